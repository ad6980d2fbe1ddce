"""The tasks of EleutherAI's lm-evaluation-harness, checked before anything is scored."""

from collections.abc import Sequence
from typing import Any

from lm_eval.tasks import TaskManager

from fiddlex.errors import ConfigError
from fiddlex.terminal.readable import counted


class _CheckedTasks(TaskManager):
    """The harness' catalogue, which checks the examples for contexts of the tasks that are loaded."""

    def __init__(self, *, include_path: str | None, num_fewshot: int | None):
        super().__init__(include_path=include_path)
        self._num_fewshot = num_fewshot  # for tasks whose own number is not 0; None: as each task says

    def load(self, task_list: Any) -> Any:
        loaded = super().load(task_list)
        for name, task in loaded["tasks"].items():
            own = task.get_config("num_fewshot")
            number = own if self._num_fewshot is None or own == 0 else self._num_fewshot
            if number:
                scored = task.fewshot_cfg.split == task.config.test_split  # the line that is scored is no example
                most = len(list(task.fewshot_docs())) - scored
                if number > most:
                    raise ConfigError(
                        f"--num_fewshot={number}: the task {name} has {counted(most, 'example')} for a context. Ask "
                        "for as many at most."
                    )
        return loaded


def task_manager(tasks: Sequence[str], include_path: str | None, num_fewshot: int | None) -> TaskManager:
    """The harness' catalogue, with the tasks of the folder `include_path`; an error when it lacks one of `tasks`."""
    manager = _CheckedTasks(include_path=include_path, num_fewshot=num_fewshot)
    if unknown := [name for name in tasks if not manager.match_tasks([name])]:
        raise ConfigError(
            f"--tasks={','.join(tasks)}: lm-evaluation-harness has no {' and no '.join(map(repr, unknown))}. It"
            " lists its tasks with `lm_eval ls tasks`; --include_path names a folder with files of more."
        )
    return manager
