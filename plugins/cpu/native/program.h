// A program: calls of kernels with their arguments by value, written down once and run again without Python.
#pragma once
#include <cstddef>
#include <cstring>
#include <type_traits>
#include <vector>

namespace qiao {

class Program {
 public:
  // Adds a call of function, which is copied byte by byte: it must own all that it reads but the tensors' memory.
  template <class Function>
  void append(const char* name, const Function& function) {
    static_assert(std::is_trivially_copyable<Function>::value, "a step is kept as plain bytes");
    static_assert(alignof(Function) <= kAlignment, "steps are aligned to this");
    const size_t offset = (bytes_.size() + kAlignment - 1) / kAlignment * kAlignment;
    bytes_.resize(offset + sizeof(Function));
    memcpy(bytes_.data() + offset, &function, sizeof(Function));
    steps_.push_back({[](const void* f) { (*static_cast<const Function*>(f))(); }, offset, name});
  }

  // Runs all steps in order on the pool's threads, which stay awake between them. What a step throws comes out; `step` is
  // the one that was run last.
  void replay(int& step) const;

  // The same, and adds to seconds[i] what step i took.
  void profile(int& step, double* seconds) const;

  int size() const { return int(steps_.size()); }
  size_t bytes() const { return sizeof(*this) + bytes_.capacity() + steps_.capacity() * sizeof(Step); }
  const char* name(int step) const { return steps_[step].name; }

 private:
  static constexpr size_t kAlignment = 16;  // what operator new gives
  struct Step {
    void (*call)(const void*);
    size_t offset;
    const char* name;
  };
  std::vector<Step> steps_;
  std::vector<unsigned char> bytes_;
};

// What calls of this thread are added to; null where nothing is recorded.
Program* recording();
void record_into(Program* program);

}  // namespace qiao
