// The instruction sets of this build, and which of them this processor can run.
#pragma once
#include <vector>

#include "kernels.h"

namespace qiao {

struct Variant {
  const char* name;
  const Kernels* (*table)();
  int score;          // a higher one is preferred; 0: this processor or this system cannot run it
  const char* needs;  // what it asks of the processor, in the words of the processor's vendor
};

std::vector<Variant> variants();

}  // namespace qiao
