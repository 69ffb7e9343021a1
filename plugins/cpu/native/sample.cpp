// Tokens are put into buckets by how far their logit is below the highest. Only the buckets from which the token may
// come are sorted, one after the other, so that the order of falling probability is known as far as it is needed.
#include "sample.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "pool.h"

namespace qiao {
namespace {

constexpr int kBuckets = 2048;

// The tokens with any probability in falling order (ties: lower id first), worked out as far as one asks.
class Falling {
 public:
  Falling(const float* logits, const float* weights, int vocab, float highest) : logits_(logits) {
    float lowest = highest;
    for (int i = 0; i < vocab; ++i)
      if (weights[i] > 0) lowest = std::min(lowest, logits[i]);
    const float span = highest - lowest, per_bucket = span > 0 ? (kBuckets - 1) / span : 0;
    starts_.assign(kBuckets + 1, 0);
    auto bucket = [&](int i) { return std::min(kBuckets - 1, int((highest - logits[i]) * per_bucket)); };
    for (int i = 0; i < vocab; ++i)
      if (weights[i] > 0) ++starts_[bucket(i) + 1];
    for (int b = 0; b < kBuckets; ++b) starts_[b + 1] += starts_[b];
    order_.resize(starts_[kBuckets]);
    std::vector<int> next(starts_.begin(), starts_.end() - 1);
    for (int i = 0; i < vocab; ++i)
      if (weights[i] > 0) order_[next[bucket(i)]++] = i;
  }

  int size() const { return int(order_.size()); }

  int operator[](int place) {
    while (place >= starts_[sorted_]) {
      auto first = order_.begin() + starts_[sorted_], last = order_.begin() + starts_[sorted_ + 1];
      std::sort(first, last, [this](int a, int b) { return logits_[a] != logits_[b] ? logits_[a] > logits_[b] : a < b; });
      ++sorted_;
    }
    return order_[place];
  }

 private:
  const float* logits_;
  std::vector<int> starts_, order_;
  int sorted_ = 0;  // buckets in order so far
};

int64_t draw(Falling& order, const float* weights, double total, const SampleSettings& s) {
  int kept = order.size();
  if (s.top_k > 0 && s.top_k < kept) {
    kept = s.top_k;
    total = 0;
    for (int i = 0; i < kept; ++i) total += weights[order[i]];
  }
  if (s.top_p < 1) {
    double reached = 0;
    int count = 0;
    while (count < kept && (count == 0 || reached < double(s.top_p) * total)) reached += weights[order[count++]];
    kept = count;
    total = reached;
  }
  if (s.min_p > 0) {
    const double least = double(s.min_p) * weights[order[0]];
    double reached = 0;
    int count = 0;
    while (count < kept && weights[order[count]] >= least) reached += weights[order[count++]];
    kept = count;
    total = reached;
  }
  double reached = 0;
  int last = order[0];
  for (int i = 0; i < kept; ++i) {
    last = order[i];
    reached += weights[last];
    if (reached > double(s.uniform) * total) break;
  }
  return last;
}

}  // namespace

int64_t sample_row(const Kernels& kernels, const float* logits, int vocab, const SampleSettings& settings) {
  int64_t best;
  kernels.argmax(logits, vocab, &best, 1, vocab);
  if (settings.temperature == 0 || !(logits[best] > -INFINITY) || settings.top_k == 1) return best;
  float* weights = scratch_of<float>(kTotals, vocab);
  kernels.weights_of_logits(logits, logits[best], settings.temperature, weights, vocab);
  double total = 0;
  for (int i = 0; i < vocab; ++i) total += weights[i];
  Falling order(logits, weights, vocab, logits[best]);
  return order.size() ? draw(order, weights, total, settings) : best;
}

}  // namespace qiao
