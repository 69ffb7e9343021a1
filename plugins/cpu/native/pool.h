// The threads that all kernels share, and their scratch memory.
#pragma once
#include <cstddef>

namespace qiao {

using Task = void (*)(void* context, int index);

// Calls task(context, i) once for each i < count, on the pool's threads and the caller's, and returns when all are
// done. Which thread takes which index is left open, so a task must not let its result depend on it.
void parallel(int count, Task task, void* context);

template <class Function>
void parallel(int count, Function& function) {
  parallel(count, [](void* f, int i) { (*static_cast<Function*>(f))(i); }, &function);
}

// While it lives, this thread alone has the pool, whose threads do not fall asleep between its jobs. Where another thread
// has the pool it does nothing, and each job takes its chance.
class Awake {
 public:
  Awake();
  ~Awake();
  Awake(const Awake&) = delete;
  Awake& operator=(const Awake&) = delete;

 private:
  bool taken_;
};

int threads();
void set_threads(int count, const int* cpus, int num_cpus);

// Memory of the calling thread, 64-byte aligned, kept for its next use under the same slot.
enum Slot { kInput, kPanel, kTotals, kQuantized, kScales, kQuery, kScores, kState, kPartial, kUnits, kSlots };
void* scratch(Slot slot, size_t bytes);

template <class T>
T* scratch_of(Slot slot, size_t count) {
  return static_cast<T*>(scratch(slot, count * sizeof(T)));
}

}  // namespace qiao
