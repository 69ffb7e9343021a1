// A job is published in one atomic word: epoch, number of tasks, next task. A thread claims a task by adding one to the
// word; a claim whose index is not below the count in the same word is void. So a thread that comes late to a finished
// job can never touch it, and the caller waits for claimed tasks only, not for threads that slept through the job.
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

namespace qiao {
namespace {

constexpr int kIndexBits = 24;
constexpr uint64_t kIndexMask = (uint64_t{1} << kIndexBits) - 1;
// A waiting thread looks for work this often before it yields: a few microseconds. It then has no task, so that another
// process that shares its processor, such as the HTTP front end, runs now and not in the middle of a task that all
// other threads would have to wait for.
constexpr int kSpins = 64;
constexpr int kRounds = 32;             // such stretches between two kernels: some tens of microseconds
constexpr int kRoundsAwake = 16 << 10;  // and inside a program

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  explicit Pool(int count, std::vector<int> cpus) {
    for (int i = 1; i < count; ++i) workers_.emplace_back([this, i, cpus] {
        if (!cpus.empty()) pin(cpus[i % cpus.size()]);
        work();
      });
  }

  ~Pool() {
    stop_.store(true);
    { std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  // Whether idle threads stay awake. Never needed for a right result, only for a prompt one.
  void stay_awake(bool awake) {
    awake_.store(awake);
    if (!awake) return;
    bursts_.fetch_add(1);
    wake();
  }

  // What a task throws is thrown here, after all tasks are done; of several the last.
  void run(int count, Task task, void* context) {
    task_ = task;
    context_ = context;
    done_.store(0, std::memory_order_relaxed);
    epoch_ = (epoch_ + 1) & 0xffff;
    word_.store((epoch_ << (2 * kIndexBits)) | (uint64_t(count) << kIndexBits));
    wake();
    take_tasks();
    for (int spins = 1; done_.load(std::memory_order_acquire) < count; ++spins) {
      if (spins % kSpins) pause(); else sched_yield();
    }
    if (!thrown_) return;  // written before done_ was counted up
    std::exception_ptr thrown;
    std::swap(thrown, thrown_);
    std::rethrow_exception(thrown);
  }

 private:
  static void pin(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
  }

  void wake() {
    if (sleepers_.load() == 0) return;
    { std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
  }

  void take_tasks() {
    for (;;) {
      uint64_t claim = word_.fetch_add(1, std::memory_order_acq_rel);
      int index = int(claim & kIndexMask), count = int((claim >> kIndexBits) & kIndexMask);
      if (index >= count) return;
      try {
        task_(context_, index);
      } catch (...) {
        std::lock_guard<std::mutex> lock(mutex_);
        thrown_ = std::current_exception();
      }
      done_.fetch_add(1, std::memory_order_acq_rel);
    }
  }

  static bool open(uint64_t word) { return (word & kIndexMask) < ((word >> kIndexBits) & kIndexMask); }

  bool wanted() const { return open(word_.load(std::memory_order_relaxed)) || stop_.load(std::memory_order_relaxed); }

  // Whether there is something to do, after waiting for it for a while.
  bool spin() const {
    for (int round = 0; round < kRoundsAwake; ++round) {
      for (int i = 0; i < kSpins; ++i) {
        if (wanted()) return true;
        pause();
      }
      if (round >= kRounds && !awake_.load(std::memory_order_relaxed)) return false;
      sched_yield();
    }
    return false;
  }

  void work() {
    while (!stop_.load()) {
      if (open(word_.load())) {
        take_tasks();
        continue;
      }
      const unsigned bursts = bursts_.load();
      if (spin()) continue;
      std::unique_lock<std::mutex> lock(mutex_);
      sleepers_.fetch_add(1);
      wake_.wait(lock, [&] { return stop_.load() || open(word_.load()) || bursts_.load() != bursts; });
      sleepers_.fetch_sub(1);
    }
  }

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  Task task_ = nullptr;
  void* context_ = nullptr;
  std::exception_ptr thrown_;
  uint64_t epoch_ = 0;
  std::atomic<bool> stop_{false}, awake_{false};
  std::atomic<unsigned> bursts_{0};
  std::atomic<int> sleepers_{0};
  alignas(64) std::atomic<uint64_t> word_{0};
  alignas(64) std::atomic<int> done_{0};
};

// All of it lives until the process ends: threads must not be joined from a static destructor.
struct Shared {
  std::mutex busy;  // held while a job runs; a second caller does its own work meanwhile
  Pool* pool = nullptr;          // read and changed under `busy` alone
  std::atomic<int> threads{1};   // its size, for those who only ask
};

Shared* shared = new Shared;

thread_local bool mine = false;      // whether this thread holds `busy` over several jobs
thread_local bool computes = false;  // whether this thread runs a job's tasks; what they ask for in turn it does alone

void after_fork() { shared = new Shared; }  // the child has no workers and nobody who could free a lock

const int registered = pthread_atfork(nullptr, nullptr, after_fork);

struct Buffer {
  void* data = nullptr;
  size_t size = 0;
  ~Buffer() { free(data); }
};

}  // namespace

namespace {

void run_alone(int count, Task task, void* context) {
  for (int i = 0; i < count; ++i) task(context, i);
}

// The caller holds `busy`.
void run_on(Pool* pool, int count, Task task, void* context) {
  const int most = int(kIndexMask) / 2;  // leaves room for void claims
  if (!pool || count > most) return run_alone(count, task, context);
  struct Computes {
    Computes() { computes = true; }
    ~Computes() { computes = false; }
  } here;
  pool->run(count, task, context);
}

}  // namespace

void parallel(int count, Task task, void* context) {
  if (count <= 1 || computes) return run_alone(count, task, context);
  if (mine) return run_on(shared->pool, count, task, context);
  if (!shared->busy.try_lock()) return run_alone(count, task, context);
  std::lock_guard<std::mutex> lock(shared->busy, std::adopt_lock);
  run_on(shared->pool, count, task, context);
}

Awake::Awake() : taken_(!mine && shared->busy.try_lock()) {
  if (!taken_) return;
  mine = true;
  if (shared->pool) shared->pool->stay_awake(true);
}

Awake::~Awake() {
  if (!taken_) return;
  if (shared->pool) shared->pool->stay_awake(false);
  mine = false;
  shared->busy.unlock();
}

int threads() { return shared->threads.load(std::memory_order_relaxed); }

void set_threads(int count, const int* cpus, int num_cpus) {
  std::lock_guard<std::mutex> lock(shared->busy);
  delete shared->pool;
  shared->pool = nullptr;
  shared->threads.store(1);
  if (count <= 1) return;
  shared->pool = new Pool(count, std::vector<int>(cpus, cpus + num_cpus));
  shared->threads.store(count);
}

void* scratch(Slot slot, size_t bytes) {
  thread_local Buffer buffers[kSlots];
  Buffer& buffer = buffers[slot];
  if (buffer.size < bytes) {
    free(buffer.data);
    buffer.size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    buffer.data = aligned_alloc(64, buffer.size);
    if (!buffer.data) {
      buffer.size = 0;
      throw std::bad_alloc();
    }
  }
  return buffer.data;
}

}  // namespace qiao
