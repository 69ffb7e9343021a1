// What this processor can do at most: read bandwidth of memory, and arithmetic of register-only loops, on `threads` threads.
//   cc -O3 -march=native -pthread peaks.c -o peaks && ./peaks THREADS
// Prints "name value" lines: GB/s, and Gop/s with two operations for a multiplication and addition. Best of several runs,
// since other work on the machine only ever lowers a figure.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

enum { REPEATS = 7, MAX_THREADS = 256, LOOPS = 20000000 };
static const size_t BYTES = (size_t)1 << 30;

typedef struct {
  const char *data;
  size_t bytes;
  void (*kernel)(const char *, size_t);
} Task;

static volatile int sink;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void *run_task(void *argument) {
  Task *task = argument;
  task->kernel(task->data, task->bytes);
  return NULL;
}

// The shortest of several runs of `kernel` on all threads at once, in seconds.
static double best_seconds(void (*kernel)(const char *, size_t), const char *data, int threads) {
  double best = 1e30;
  for (int repeat = 0; repeat < REPEATS; repeat++) {
    pthread_t ids[MAX_THREADS];
    Task tasks[MAX_THREADS];
    size_t each = BYTES / threads / 4096 * 4096;
    double start = now();
    for (int i = 0; i < threads; i++) {
      tasks[i] = (Task){data + each * i, each, kernel};
      pthread_create(&ids[i], NULL, run_task, &tasks[i]);
    }
    for (int i = 0; i < threads; i++) pthread_join(ids[i], NULL);
    double seconds = now() - start;
    if (seconds < best) best = seconds;
  }
  return best;
}

static void read_all(const char *data, size_t bytes) {
  typedef uint64_t Block __attribute__((vector_size(64)));
  Block a = {0}, b = {0}, c = {0}, d = {0};
  for (size_t i = 0; i + 256 <= bytes; i += 256) {
    __builtin_prefetch(data + i + 4096);
    __builtin_prefetch(data + i + 4160);
    __builtin_prefetch(data + i + 4224);
    __builtin_prefetch(data + i + 4288);
    a ^= *(const Block *)(data + i);
    b ^= *(const Block *)(data + i + 64);
    c ^= *(const Block *)(data + i + 128);
    d ^= *(const Block *)(data + i + 192);
  }
  a ^= b ^ c ^ d;
  sink = (int)a[0];
}

// Ten independent sums keep both multiplication units busy whatever their latency, and leave registers for the rest.
#define TEN(DO) DO(s0) DO(s1) DO(s2) DO(s3) DO(s4) DO(s5) DO(s6) DO(s7) DO(s8) DO(s9)
#define SUMS 10
#define KEEP(s) __asm__ volatile("" : "+" REGISTER(s));
#define LOOP(NAME, TYPE, START, VALUE, STEP, END)                                                           \
  static void NAME(const char *data, size_t bytes) {                                                        \
    (void)data, (void)bytes;                                                                                \
    TYPE s0 = START, s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0, s7 = s0, s8 = s0, s9 = s0;       \
    __auto_type x = VALUE;                                                                                  \
    __auto_type y = VALUE;                                                                                  \
    for (long k = 0; k < LOOPS; k++) {                                                                      \
      KEEP(x)                                                                                               \
      KEEP(y)                                                                                               \
      TEN(STEP)                                                                                             \
      TEN(KEEP)                                                                                             \
    }                                                                                                       \
    sink = (int)END(s3);                                                                                    \
  }

#if defined(__AVX512F__)
#define REGISTER "v"
#define FP32_OPS 32
#define FMA(s) s = _mm512_fmadd_ps(x, y, s);
LOOP(fp32, __m512, _mm512_setzero_ps(), _mm512_set1_ps(1e-9f), FMA, _mm512_cvtss_f32)
#elif defined(__FMA__)
#define REGISTER "x"
#define FP32_OPS 16
#define FMA(s) s = _mm256_fmadd_ps(x, y, s);
LOOP(fp32, __m256, _mm256_setzero_ps(), _mm256_set1_ps(1e-9f), FMA, _mm256_cvtss_f32)
#elif defined(__aarch64__)
#define REGISTER "w"
#define FP32_OPS 8
#define FMA(s) s = vfmaq_f32(s, x, y);
#define FIRST(s) vgetq_lane_f32(s, 0)
LOOP(fp32, float32x4_t, vdupq_n_f32(0), vdupq_n_f32(1e-9f), FMA, FIRST)
#endif

#if defined(__AVX512VNNI__)
#define INT8_NAME "vpdpbusd, 512 bits"
#define INT8_OPS 128
#define DOT(s) s = _mm512_dpbusd_epi32(s, x, y);
#define LAST(s) _mm_cvtsi128_si32(_mm512_castsi512_si128(s))
LOOP(int8, __m512i, _mm512_setzero_si512(), _mm512_set1_epi8(1), DOT, LAST)
#elif defined(__AVXVNNI__)
#define INT8_NAME "vpdpbusd, 256 bits"
#define INT8_OPS 64
#define DOT(s) s = _mm256_dpbusd_avx_epi32(s, x, y);
LOOP(int8, __m256i, _mm256_setzero_si256(), _mm256_set1_epi8(1), DOT, _mm256_cvtsi256_si32)
#elif defined(__AVX2__)
// Without a dot product: multiply bytes and add pairs, add pairs of those, add. Three instructions for 32 products.
// KEEP(x) keeps the first of the three from being taken out of the loop.
#define INT8_NAME "vpmaddubsw + vpmaddwd + vpaddd"
#define INT8_OPS 64
#define DOT(s) \
  KEEP(x)      \
  s = _mm256_add_epi32(s, _mm256_madd_epi16(_mm256_maddubs_epi16(x, y), y));
LOOP(int8, __m256i, _mm256_setzero_si256(), _mm256_set1_epi8(1), DOT, _mm256_cvtsi256_si32)
#elif defined(__ARM_FEATURE_DOTPROD)
#define INT8_NAME "sdot"
#define INT8_OPS 32
#define DOT(s) s = vdotq_s32(s, x, y);
#define LAST(s) vgetq_lane_s32(s, 0)
LOOP(int8, int32x4_t, vdupq_n_s32(0), vdupq_n_s8(1), DOT, LAST)
#endif

int main(int count, char **words) {
  int threads = count > 1 ? atoi(words[1]) : 1;
  if (threads < 1 || threads > MAX_THREADS) return 2;
  char *data = aligned_alloc(4096, BYTES);
  if (!data) return 1;
  memset(data, 1, BYTES);
  printf("memory_gb_s %.2f\n", BYTES / best_seconds(read_all, data, threads) / 1e9);
#ifdef FP32_OPS
  printf("fp32_gop_s %.1f\n", (double)SUMS * LOOPS * FP32_OPS * threads / best_seconds(fp32, data, threads) / 1e9);
#endif
#ifdef INT8_OPS
  printf("int8_gop_s %.1f\n", (double)SUMS * LOOPS * INT8_OPS * threads / best_seconds(int8, data, threads) / 1e9);
  printf("int8_instructions %s\n", INT8_NAME);
#endif
  return 0;
}
