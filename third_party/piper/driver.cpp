// Prints, for each problem whose file is given, the seconds that the published Piper finds, or -1 where nothing fits.
// compare.py compiles this with the folder of msr-fiddle/piper among the include paths.

#include <algorithm>
#include <cassert>
#include <cmath>
#include <ctime>
#include <map>
#include <numeric>
#include <tuple>
#include <unordered_map>
#include <vector>

#define main published_main
#include "algo.cpp"
#undef main

int main(int count, char **files) {
    for (int i = 1; i < count; ++i) {
        ifstream file(files[i]);
        json problem;
        file >> problem;
        const Instance instance = problem.get<Instance>();
        Graph graph(instance);
        const Result found = graph.runDP();
        cout << setprecision(17) << (found.stages.empty() ? -1.0 : graph.getTPSForResult(found)) << endl;
    }
}
