"""Layouts of the full tier alone: more combinations than `layouts` has for the default tier, and some more values."""

import itertools

from tests.train.layouts import case, cases

# With `COVERING` these have every pair of levels.
PAIRWISE = cases("""
mesh  model                schedule         v m layers  sp recompute optimizer zero1 dropout semantics     prediction
1x2x1 gpt                  zb_h2            1 4 3,1     -  full      adam      zero1 -       sync          -
1x4x2 gpt                  zb_h1            1 8 -       sp full      lamb      -     dropout 2bw           -
1x3x1 gpt                  1f1b             1 2 1,2,1   -  full      adafactor -     dropout delay:3       -
2x3x1 gpt                  zb_h1            1 2 1,2,1   -  none      adafactor zero1 dropout stash         -
2x2x1 mlm_nsp,post         interleaved_1f1b 2 2 1,2,1,1 -  full      lamb      zero1 -       delay:3       -
1x3x2 mlm_nsp,post         odd              2 4 -       -  selective lamb      -     -       vertical_sync -
1x1x1 mlm_nsp,post         zb_v             2 4 3,1     -  none      adafactor -     dropout 2bw           -
2x4x1 mlm_nsp,post         zb_h1            1 8 -       -  selective sgd       -     dropout delay:3       -
2x1x1 mlm_nsp,post         1f1b             1 1 -       -  selective adam      zero1 dropout stash         -
2x3x1 mlm,pre              odd              2 4 -       -  full      adam      zero1 -       stash         -
1x4x2 mlm,pre              gpipe            1 8 -       -  none      adafactor zero1 -       vertical_sync -
1x2x2 mlm,pre              zb_v             2 2 -       sp none      lamb      -     dropout stash         -
2x3x1 classification,post  odd              2 4 -       -  full      adafactor zero1 -       delay:3       -
1x1x2 classification,post  gpipe            1 4 -       sp none      adam      zero1 dropout delay:3       -
2x3x1 classification,post  1f1b             1 2 1,2,1   -  none      lamb      zero1 dropout vertical_sync -
2x1x2 multiple_choice,post zb_v             2 1 3,1     -  full      lamb      zero1 dropout delay:3       -
1x2x2 multiple_choice,post gpipe            1 4 3,1     -  selective sgd       -     dropout stash         -
1x4x2 multiple_choice,post zb_h2            1 8 1,2,1,1 -  full      adamw     zero1 dropout vertical_sync -
1x4x2 multiple_choice,post 1f1b             1 8 1,2,1,1 -  full      adamw     zero1 dropout 2bw           -
""")

FURTHER = cases("""
mesh   model                 schedule          v  m  layers   sp  recompute  optimizer  zero1  dropout  semantics
1x1x1  gpt                   1f1b              1  1  -        -   none       sgd        zero1  dropout  sync
1x1x1  gpt                   1f1b              1  4  -        -   full       sgd        zero1  dropout  sync
2x1x1  gpt                   1f1b              1  1  -        -   none       sgd        zero1  dropout  sync
2x1x1  gpt                   1f1b              1  8  -        -   none       sgd        -      -        sync
1x1x2  gpt                   1f1b              1  1  -        -   selective  sgd        zero1  -        sync
1x1x2  gpt                   1f1b              1  1  -        sp  none       sgd        zero1  dropout  sync
2x1x2  gpt                   1f1b              1  2  -        -   none       sgd        zero1  dropout  sync
2x1x2  gpt                   1f1b              1  4  -        sp  full       sgd        zero1  dropout  sync
2x1x2  gpt                   1f1b              1  1  -        -   none       adamw      -      dropout  sync
4x1x2  gpt                   1f1b              1  2  -        -   none       adamw      zero1  dropout  sync
4x1x2  gpt                   1f1b              1  1  -        sp  selective  sgd        zero1  dropout  sync
2x1x4  gpt                   1f1b              1  1  -        -   none       sgd        -      dropout  sync
2x1x4  gpt                   1f1b              1  4  -        sp  none       adamw      zero1  dropout  sync
2x1x2  gpt                   1f1b              1  1  -        -   none       adam       zero1  dropout  sync
2x1x4  gpt                   1f1b              1  1  -        -   none       lamb       zero1  dropout  sync
4x1x2  gpt                   1f1b              1  1  -        -   none       adafactor  zero1  dropout  sync
1x2x1  gpt                   1f1b              1  4  -        -   none       sgd        zero1  dropout  sync
2x2x2  gpt                   interleaved_1f1b  2  2  -        -   none       adamw      zero1  dropout  sync
2x2x2  gpt                   interleaved_1f1b  2  4  -        sp  none       sgd        zero1  dropout  sync
1x4x1  gpt                   1f1b              1  8  -        -   full       sgd        zero1  dropout  sync
2x4x1  gpt                   gpipe             1  2  -        -   selective  sgd        zero1  dropout  sync
1x4x2  gpt                   1f1b              1  1  -        sp  full       sgd        zero1  dropout  sync
1x3x1  gpt                   1f1b              1  4  -        -   none       sgd        zero1  dropout  sync
2x2x1  gpt                   1f1b              1  4  3,1      -   selective  sgd        zero1  dropout  sync
1x2x2  gpt                   interleaved_1f1b  2  4  1,1,1,1  -   none       sgd        zero1  dropout  sync
1x3x1  gpt                   zb_h1             1  4  1,2,1    -   full       sgd        zero1  dropout  sync
2x2x2  gpt                   zb_h1             1  4  -        sp  none       sgd        zero1  dropout  sync
1x4x1  gpt                   zb_h1             1  8  -        -   none       adamw      zero1  dropout  sync
2x4x1  gpt                   zb_h2             1  8  -        -   none       sgd        zero1  -        sync
1x2x2  gpt                   zb_v              2  4  -        -   full       sgd        zero1  dropout  sync
2x2x2  gpt                   zb_v              2  2  -        sp  selective  sgd        zero1  dropout  sync
1x1x1  gpt                   interleaved_1f1b  3  4  1,2,1    -   none       sgd        zero1  dropout  sync
2x3x1  gpt                   odd               2  4  -        -   none       sgd        zero1  dropout  sync
4x2x1  gpt                   1f1b              1  4  1,3      -   none       lamb       zero1  dropout  sync
2x2x1  gpt                   1f1b              1  2  3,1      -   none       adafactor  zero1  dropout  sync
1x2x1  gpt                   1f1b              1  2  -        -   none       sgd        zero1  dropout  2bw
2x2x1  gpt                   1f1b              1  2  -        -   none       adamw      zero1  dropout  2bw
1x4x1  gpt                   1f1b              1  8  -        -   full       sgd        zero1  dropout  2bw
2x4x1  gpt                   1f1b              1  4  -        -   none       adamw      zero1  dropout  2bw
2x2x2  gpt                   interleaved_1f1b  2  4  -        sp  none       sgd        zero1  dropout  2bw
1x2x2  gpt                   1f1b              1  2  3,1      -   selective  sgd        -      dropout  2bw
1x4x1  gpt                   zb_h1             1  8  -        -   none       adamw      zero1  dropout  2bw
2x2x1  gpt                   zb_v              2  4  -        -   none       lamb       zero1  dropout  2bw
2x3x1  gpt                   odd               2  4  -        -   none       sgd        zero1  dropout  2bw
1x4x1  gpt                   gpipe             1  8  -        -   none       sgd        zero1  -        2bw
2x1x2  gpt                   1f1b              1  2  -        -   none       sgd        zero1  dropout  2bw
1x4x1  gpt                   1f1b              1  1  -        -   none       sgd        zero1  dropout  stash
2x2x1  gpt                   1f1b              1  1  -        -   none       adamw      zero1  dropout  stash
1x2x2  gpt                   interleaved_1f1b  2  4  -        -   none       adamw      zero1  dropout  stash
2x2x2  gpt                   zb_h1             1  4  1,3      -   none       sgd        zero1  dropout  stash
1x4x1  gpt                   1f1b              1  1  -        -   none       adamw      zero1  dropout  vertical_sync
2x2x2  gpt                   1f1b              1  1  -        sp  none       sgd        zero1  dropout  vertical_sync
1x3x1  gpt                   1f1b              1  4  2,1,1    -   none       sgd        zero1  dropout  vertical_sync
2x2x1  gpt                   zb_v              2  2  -        -   none       sgd        zero1  dropout  vertical_sync
1x2x1  gpt                   1f1b              1  2  -        -   none       adamw      zero1  dropout  delay:3
1x1x1  mlm_nsp,post          1f1b              1  1  -        -   none       sgd        zero1  dropout  sync
2x1x1  mlm_nsp,pre           1f1b              1  8  -        -   none       sgd        zero1  dropout  sync
2x1x2  mlm_nsp,post          1f1b              1  2  -        sp  none       sgd        zero1  dropout  sync
2x1x2  mlm_nsp,pre           1f1b              1  2  -        sp  selective  sgd        zero1  dropout  sync
2x1x4  mlm,post              1f1b              1  1  -        -   none       adamw      -      dropout  sync
4x1x2  mlm_nsp,post          1f1b              1  2  -        -   full       lamb       zero1  dropout  sync
4x1x2  classification,post   1f1b              1  1  -        sp  none       sgd        zero1  dropout  sync
2x1x2  multiple_choice,post  1f1b              1  2  -        -   none       adamw      zero1  dropout  sync
1x4x1  mlm_nsp,post          1f1b              1  8  -        -   full       sgd        zero1  dropout  sync
2x2x2  mlm_nsp,post          interleaved_1f1b  2  2  -        -   none       adamw      zero1  dropout  sync
2x2x2  mlm_nsp,post          interleaved_1f1b  2  4  -        sp  none       sgd        zero1  dropout  sync
2x2x2  classification,post   zb_h1             1  4  -        sp  none       sgd        zero1  dropout  sync
2x2x1  mlm_nsp,pre           zb_h1             1  4  -        -   full       sgd        zero1  dropout  sync
2x4x1  mlm,post              zb_h2             1  8  -        -   none       sgd        zero1  -        sync
1x2x2  multiple_choice,post  zb_v              2  4  -        -   none       sgd        zero1  dropout  sync
2x3x1  mlm_nsp,post          odd               2  4  -        -   selective  sgd        zero1  dropout  sync
2x4x1  mlm_nsp,post          gpipe             1  2  1,1,1,1  -   none       sgd        zero1  dropout  sync
1x2x2  multiple_choice,post  1f1b              1  4  3,1      sp  none       sgd        zero1  dropout  sync
1x4x1  mlm_nsp,post          1f1b              1  8  -        -   none       adamw      zero1  dropout  2bw
2x2x2  mlm_nsp,pre           interleaved_1f1b  2  4  -        -   none       sgd        zero1  dropout  2bw
2x2x2  classification,post   1f1b              1  2  -        sp  none       sgd        zero1  dropout  2bw
2x2x1  mlm,post              zb_v              2  4  -        -   none       sgd        zero1  dropout  2bw
2x2x2  mlm_nsp,post          zb_h1             1  4  1,3      -   none       sgd        zero1  dropout  stash
1x3x1  mlm,post              1f1b              1  4  2,1,1    -   none       sgd        zero1  dropout  vertical_sync
1x2x2  classification,post   1f1b              1  2  -        -   none       adamw      zero1  dropout  delay:3
1x2x1  gpt                   mixed             1  2  -        -   none       sgd        zero1  dropout  sync
1x4x1  gpt                   zb_h2             1  8  2,1,1,1  -   none       sgd        zero1  dropout  sync
1x4x1  gpt                   gpipe             1  2  -        -   none       sgd        zero1  dropout  sync
""")

FURTHER_FOUND = cases("""
mesh  model        schedule v m  layers            sp recompute optimizer zero1 dropout semantics
1x2x2 gpt          auto     1 4  -                 sp none      adamw     -     -       sync
1x2x2 gpt          auto     2 4  2,1,1,2           -  full      sgd       -     dropout sync
1x3x1 llama        auto     2 8  1,1,2,1,1,1       -  none      muon      -     -       sync
1x3x1 gpt          auto     3 4  1,1,1,1,1,1,1,1,1 -  none      adamw     -     -       sync
2x2x1 mlm_nsp,post auto     1 2  1,3               -  none      adafactor zero1 dropout sync
2x4x1 gpt          auto     1 8  1,2,2,1           -  gelu      adamw     zero1 -       sync
1x4x2 gpt          auto     1 4  balanced,6        -  full      adamw     zero1 -       sync
1x1x4 gpt          auto     2 4  -                 sp selective adamw     -     dropout sync
2x2x2 gpt          auto     2 8  balanced,6        -  none      lamb      zero1 -       sync
1x8x1 gpt          auto     1 16 1,1,2,1,1,1,1,1   -  none      adamw     -     -       sync
""")

FURTHER_PUBLISHED = cases("""
mesh  model        schedule                v m layers  sp recompute optimizer zero1 dropout semantics
2x3x1 llama        1f1b,strict             1 4 1,2,1   -  none      adamw     zero1 -       2bw
1x2x2 mlm,pre      interleaved_1f1b,strict 2 4 -       sp selective sgd       zero1 dropout sync
1x4x2 gpt          gpipe,strict            1 4 -       -  full      adamw     -     -       stash
1x3x1 gpt          odd,ahead               2 4 -       -  none      adamw     -     -       sync
1x2x4 llama        v_half                  2 4 -       -  full      lamb      -     -       sync
2x2x2 mlm_nsp,post v_min                   2 2 2,1,1,1 sp none      adamw     zero1 dropout sync
1x2x2 gpt          v_min                   2 4 -       -  none      adamw     -     -       2bw
2x2x1 gpt          v_half                  2 4 -       -  none      sgd       zero1 dropout stash
1x1x2 gpt          v_half                  2 1 3,1     -  gelu      adamw     -     -       sync
""")

FURTHER_PAIRED = cases("""
mesh  model         schedule         v m layers  sp recompute optimizer zero1 dropout semantics
1x1x1 gpt           dual_pipe_v      2 4 -       -  none      adamw     -     dropout sync
2x2x2 gpt           dual_pipe_v      2 2 -       sp selective adamw     zero1 dropout sync
1x3x1 gpt           dual_pipe_v      2 8 1,1,1,1,1,1 - none   sgd       zero1 dropout sync
1x2x2 llama,tied    dual_pipe_v      2 4 2,1,1,1 sp gelu,norms muon     zero1 -       2bw
2x2x1 mlm_nsp,post  dual_pipe_v      2 4 -       -  full      lamb      -     dropout stash
2x2x2 mlm,pre       overlapped,ahead 2 4 -       sp masks     adamw     zero1 dropout 2bw
1x2x2 gpt           dual_pipe_v,ahead 2 4 -     -  none      adamw     zero1 dropout 2bw
""")

FURTHER_LLAMA = cases("""
mesh  model      schedule         v m layers  sp recompute optimizer zero1 dropout semantics
1x1x1 llama      1f1b             1 1 -       -  none      adamw     -     dropout sync
1x1x1 llama,tied 1f1b             1 4 -       -  full      sgd       -     -       sync
1x1x4 llama      1f1b             1 1 -       -  none      adamw     -     dropout sync
1x1x4 llama,tied 1f1b             1 2 -       sp selective sgd       -     dropout sync
2x1x4 llama,tied 1f1b             1 1 -       -  full      muon      zero1 -       sync
4x1x2 llama      1f1b             1 2 -       sp none      adafactor zero1 -       sync
1x2x4 llama      zb_h1            1 4 -       -  none      adamw     -     -       sync
1x2x4 llama,tied zb_h2            1 4 -       sp full      sgd       -     dropout sync
2x2x2 llama,tied zb_v             2 2 -       -  none      lamb      zero1 -       sync
1x4x2 llama      gpipe            1 4 1,2,1,1 -  none      adam      -     dropout sync
2x4x1 llama      1f1b             1 8 -       -  selective adamw     zero1 -       2bw
1x2x4 llama      interleaved_1f1b 2 4 -       sp none      adamw     -     -       2bw
2x2x2 llama,tied 1f1b             1 4 3,1     sp full      muon      zero1 dropout stash
1x2x4 llama,tied zb_h1            1 4 -       -  none      sgd       zero1 -       vertical_sync
2x2x1 llama      zb_v             2 4 -       -  none      lamb      zero1 -       delay:2
2x3x1 llama      odd              2 4 -       -  none      adamw     zero1 -       stash
""")

# Predictions with each optimizer and each kind of delay, and rows with other schedules.
_MESHES = ("2x2x1 gpt 1f1b 1 4 3,1 - none", "1x2x2 gpt interleaved_1f1b 2 4 - sp none", "2x2x2 gpt zb_h1 1 2 - - full")
FURTHER_PREDICTED = cases("""
mesh  model        schedule         v m layers sp recompute optimizer zero1 dropout semantics prediction
1x2x1 gpt          1f1b             1 2 -      -  none      sgd       zero1 -       2bw       extrapolate,1,1
2x2x1 gpt          interleaved_1f1b 2 4 -      -  full      adamw     zero1 -       stash     extrapolate,2,1
2x2x1 gpt          gpipe            1 4 -      -  none      lamb      zero1 -       delay:2   momentum,1,0.7
2x3x1 gpt          odd              2 4 -      -  none      sgd       zero1 -       stash     momentum,1,1
2x1x2 gpt          1f1b             1 2 -      -  none      muon      zero1 dropout delay:2   extrapolate,2,1
1x3x1 gpt          1f1b             1 4 1,2,1  -  none      muon      -     -       stash     momentum,2,1
""") + [
    case(f"{mesh} {optimizer} {zero1} - {semantics} {prediction}")
    for number, (optimizer, semantics, prediction) in enumerate(
        itertools.product(
            ("sgd", "adamw", "lamb", "muon"),
            ("2bw", "stash", "delay:2"),
            ("extrapolate,1,1", "extrapolate,2,1", "momentum,1,1", "momentum,2,1"),
        )
    )
    for mesh, zero1 in [(_MESHES[(number + number // 4) % 3], "zero1" if (number + number // 4) % 2 else "-")]
]

FURTHER_RECOMPUTED = cases("""
mesh  model         schedule         v m layers sp recompute                  optimizer zero1 dropout semantics
1x1x1 gpt           1f1b             1 1 -      -  gelu                       adamw     -     -       sync
1x2x2 gpt           zb_h1            1 4 3,1    sp attention,gelu,norms,masks adamw     zero1 dropout sync
2x2x2 gpt           1f1b             1 4 -      -  norms                      sgd       zero1 -       2bw
1x2x2 gpt           zb_v             2 4 -      -  masks                      adamw     zero1 dropout stash
1x1x2 mlm,post      1f1b             1 1 -      sp norms                      adamw     -     -       sync
2x2x1 mlm,pre       zb_h1            1 4 -      -  attention,gelu             lamb      zero1 dropout sync
1x4x2 mlm,pre       1f1b             1 4 -      sp gelu,norms                 adamw     zero1 -       2bw
1x1x1 multiple_choice,post 1f1b      1 2 -      -  gelu,norms,masks           adamw     -     dropout sync
1x1x4 llama         1f1b             1 2 -      sp gelu,norms                 adamw     -     -       sync
1x2x4 llama,tied    zb_v             2 4 -      sp attention,norms            muon      zero1 -       sync
2x2x1 llama         zb_h1            1 4 3,1    -  gelu,masks                 adamw     zero1 dropout 2bw
""")

FURTHER_OFFLOADED = cases("""
mesh  model         schedule         v m layers  sp recompute  optimizer         zero1 dropout semantics
1x1x1 gpt           1f1b             1 1 -       -  none       adamw,offload     -     -       sync
1x4x2 gpt           1f1b             1 4 1,1,1,1 sp full       adam,offload      zero1 -       sync
2x1x4 llama         1f1b             1 2 -       sp none       adafactor,offload zero1 -       sync
2x2x1 llama,tied    zb_v             2 4 -       -  none       muon,offload      zero1 -       stash
2x3x1 gpt           odd              2 4 -       -  none       sgd,offload       zero1 dropout sync
4x1x2 mlm,pre       1f1b             1 2 -       sp gelu,norms sgd,offload       zero1 dropout sync
2x2x2 gpt           gpipe            1 4 3,1     -  none       adamw,offload     zero1 -       delay:2
""")

FURTHER_STREAMED = cases("""
mesh  model         schedule         v m layers      sp recompute  optimizer         zero1 dropout semantics
1x1x1 gpt           breadth_first    4 8 -           -  none       adamw,streams     -     dropout sync
1x1x2 llama         breadth_first    3 4 3,1,1       sp full       adafactor,streams zero1 -       sync
2x2x1 llama,tied    breadth_first    3 4 1,1,1,1,1,1 -  none       muon,streams      zero1 -       sync
4x1x1 gpt           breadth_first    3 1 2,1,2       -  masks      sgd,streams       zero1 dropout sync
1x2x2 mlm,pre       breadth_first    4 8 1,1,1,1,1,1,1,1 - none    adam,streams      zero1 dropout sync
""")

FURTHER_SPILLED = cases("""
mesh  model         schedule         v m layers  sp recompute        optimizer zero1 dropout semantics
1x4x1 gpt           gpipe            1 8 -       -  none             sgd       zero1 dropout sync
2x3x1 mlm,pre       1f1b             1 8 2,1,1   -  full             lamb      zero1 dropout sync
2x3x1 gpt           odd              2 4 -       -  none             sgd       zero1 dropout sync
2x2x2 gpt           interleaved_1f1b 2 4 -       sp masks            adamw     zero1 dropout 2bw
1x4x1 mlm_nsp,post  1f1b             1 8 -       -  none             adamw     -     dropout stash
2x4x1 gpt           1f1b             1 4 -       -  attention,gelu   sgd       zero1 dropout vertical_sync
""")
