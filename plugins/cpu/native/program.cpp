#include "program.h"

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

}  // namespace qiao
