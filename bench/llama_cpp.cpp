// The times of llama.cpp for bench/gguf.py, over its C API, as llama-bench calls it.
//
//   cmake -S llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF && cmake --build build -t llama
//   g++ -O2 -Illama.cpp/include -Illama.cpp/ggml/include bench/llama_cpp.cpp -o llama_cpp build/src/libllama.a \
//       build/ggml/src/libggml.a build/ggml/src/libggml-cpu.a build/ggml/src/libggml-base.a -fopenmp -lpthread -ldl
//   ./llama_cpp MODEL.gguf THREADS    prints milliseconds of loading, prompts of 512 and 2000, steps after 16 and
//                                     2000, and a step of eight sequences after 16
#include "llama.h"
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

static double now()
{
    using namespace std::chrono;
    return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

int main(int argc, char **argv)
{
    if (argc < 3) return 2;
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    const double start = now();
    llama_model *model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) return 1;
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 2304, params.n_batch = 2048, params.n_ubatch = 512;
    params.n_threads = params.n_threads_batch = atoi(argv[2]);
    llama_context *context = llama_init_from_model(model, params);
    const double loaded = now();
    std::vector<llama_token> ids(2048);
    for (int i = 0; i < 2048; i++) ids[i] = i * 7919 % 32000;
    const auto timed = [&](llama_context *context, llama_batch batch) {
        const double begin = now();
        if (llama_decode(context, batch)) exit(1);
        llama_synchronize(context);
        return now() - begin;
    };
    const auto decode = [&](int first, int n) { return timed(context, llama_batch_get_one(ids.data() + first, n)); };
    const auto prompt = [&](int n) {
        llama_memory_clear(llama_get_memory(context), true);
        return decode(0, n);
    };
    const auto step = [&](int behind) {
        std::vector<double> times;
        prompt(behind);
        for (int i = 0; i < 24; i++) times.push_back(decode(i, 1));
        std::sort(times.begin(), times.end());
        return times[12];
    };
    const auto best = [&](int n) {
        const double first = prompt(n);
        return std::min(first, prompt(n));
    };
    const auto steps_of = [&](int sequences) {
        params.n_ctx = 256 * sequences, params.n_seq_max = sequences;
        llama_context *several = llama_init_from_model(model, params);
        llama_batch batch = llama_batch_init(16 * sequences, 0, 1);
        std::vector<double> times;
        for (int i = 0; i < 25; i++) { // first the prompts, then a token of each
            const int length = i ? 1 : 16, at = i ? 15 + i : 0;
            batch.n_tokens = length * sequences;
            for (int j = 0; j < batch.n_tokens; j++) {
                const int sequence = j / length, position = at + j % length;
                batch.token[j] = ids[sequence + position], batch.pos[j] = position;
                batch.n_seq_id[j] = 1, batch.seq_id[j][0] = sequence;
                batch.logits[j] = j % length == length - 1;
            }
            const double took = timed(several, batch);
            if (i) times.push_back(took);
        }
        llama_batch_free(batch), llama_free(several);
        std::sort(times.begin(), times.end());
        return times[12];
    };
    step(16); // warms up
    printf("%.1f %.1f %.1f %.2f %.2f %.2f\n", loaded - start, best(512), best(2000), step(16), step(2000), steps_of(8));
    return 0;
}
