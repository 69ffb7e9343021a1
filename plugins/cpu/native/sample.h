// Sampling of one row without sorting the vocabulary.
#pragma once
#include "kernels.h"

namespace qiao {

struct SampleSettings {
  float temperature;
  int top_k;
  float top_p, min_p, uniform;
};

// The token that SamplingSpec.sample asks for.
int64_t sample_row(const Kernels& kernels, const float* logits, int vocab, const SampleSettings& settings);

}  // namespace qiao
