#include "program.h"

#include <chrono>

#include "pool.h"

namespace qiao {
namespace {

thread_local Program* active = nullptr;

}  // namespace

Program* recording() { return active; }
void record_into(Program* program) { active = program; }

void Program::replay(int& step) const {
  Awake awake;
  for (step = 0; step < size(); ++step) steps_[step].call(bytes_.data() + steps_[step].offset);
}

void Program::profile(int& step, double* seconds) const {
  using Clock = std::chrono::steady_clock;
  Awake awake;
  for (step = 0; step < size(); ++step) {
    const auto start = Clock::now();
    steps_[step].call(bytes_.data() + steps_[step].offset);
    seconds[step] += std::chrono::duration<double>(Clock::now() - start).count();
  }
}

}  // namespace qiao
