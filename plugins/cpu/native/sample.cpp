// Only the most likely tokens, as many as the choice may fall on, are looked at. They are put into buckets by how far their
// logit is below the highest; sums over whole buckets show in which one a set ends, and only such a bucket is sorted.
#include "sample.h"

#include <algorithm>
#include <cmath>

#include "pool.h"

namespace qiao {
namespace {

constexpr int kBuckets = 2048;
constexpr float kLevels[] = {1.8e-2f, 3.4e-4f, 1.1e-7f, 0.0f};  // e^-4, e^-8, e^-16: weights that are looked at first

// The tokens of a weight of at least `least`, in order of their ids.
struct Likely {
  int* ids;
  int count;
  double mass;
};

Likely likely(const float* weights, int vocab, float least) {
  Likely out = {scratch_of<int>(kScores, vocab), 0, 0};
  constexpr int block = 64;
  for (int i = 0; i < vocab; i += block) {
    const int end = std::min(vocab, i + block);
    int hits = 0;
    for (int j = i; j < end; ++j) hits |= weights[j] >= least;
    if (!hits) continue;
    for (int j = i; j < end; ++j)
      if (weights[j] >= least && weights[j] > 0) {
        out.ids[out.count++] = j;
        out.mass += weights[j];
      }
  }
  return out;
}

double sum(const float* weights, int vocab) {
  double parts[8] = {};
  int i = 0;
  for (; i + 8 <= vocab; i += 8)
    for (int j = 0; j < 8; ++j) parts[j] += weights[i + j];
  for (; i < vocab; ++i) parts[0] += weights[i];
  return ((parts[0] + parts[4]) + (parts[1] + parts[5])) + ((parts[2] + parts[6]) + (parts[3] + parts[7]));
}

// Tokens in falling order of probability (ties: lower id first), as sets of the first so many.
class Falling {
 public:
  Falling(const float* logits, const float* weights, const Likely& tokens, float highest)
      : logits_(logits), weights_(weights), count_(tokens.count) {
    float lowest = highest;
    for (int i = 0; i < count_; ++i) lowest = std::min(lowest, logits[tokens.ids[i]]);
    const float span = highest - lowest, per_bucket = span > 0 ? (kBuckets - 1) / span : 0;
    auto bucket = [&](int id) { return std::min(kBuckets - 1, int((highest - logits[id]) * per_bucket)); };
    mass_ = scratch_of<double>(kState, 2 * (kBuckets + 1));
    starts_ = reinterpret_cast<int*>(mass_ + kBuckets + 1);
    int* next = starts_ + kBuckets + 1;
    std::fill(starts_, starts_ + kBuckets + 1, 0);
    std::fill(mass_, mass_ + kBuckets, 0.0);
    for (int i = 0; i < count_; ++i) ++starts_[bucket(tokens.ids[i]) + 1];
    for (int b = 0; b < kBuckets; ++b) starts_[b + 1] += starts_[b];
    std::copy(starts_, starts_ + kBuckets, next);
    order_ = scratch_of<int>(kUnits, count_);
    for (int i = 0; i < count_; ++i) {
      const int id = tokens.ids[i], b = bucket(id);
      order_[next[b]++] = id;
      mass_[b] += weights[id];
    }
  }

  int size() const { return count_; }

  // The smallest set whose weight is at least `limit`, or more than it where `beyond`; at least 1 and at most `most`
  // tokens, which `weight` is set to the weight of.
  int reach(double limit, bool beyond, int most, double* weight) {
    auto reached = [&](double x) { return beyond ? x > limit : x >= limit; };
    double before = 0;
    int b = 0;
    while (b + 1 < kBuckets && starts_[b + 1] < most && !reached(before + mass_[b])) before += mass_[b++];
    sort(b);
    const int end = std::min(most, starts_[b + 1]);  // not beyond it, should sums in this order come out a little smaller
    int i = starts_[b];
    do before += weights_[order_[i++]];
    while (i < end && !reached(before));
    *weight = before;
    return i;
  }

  // The last of the first `count` tokens.
  int last_of(int count) {
    int b = 0;
    while (starts_[b + 1] < count) ++b;
    sort(b);
    return order_[count - 1];
  }

  int count_from(double least) const {
    int out = 0;
    for (int i = 0; i < count_; ++i) out += weights_[order_[i]] >= least;
    return out;
  }

 private:
  void sort(int b) {
    std::sort(order_ + starts_[b], order_ + starts_[b + 1],
              [this](int x, int y) { return logits_[x] != logits_[y] ? logits_[x] > logits_[y] : x < y; });
  }

  const float *logits_, *weights_;
  int count_, *starts_, *order_;
  double* mass_;
};

// Whether the choice falls on one of the tokens, all of a weight of at least `least`, whatever the others are.
bool enough(const Likely& tokens, float least, double total, const SampleSettings& s) {
  if (least == 0) return true;
  if (s.top_k > 0) return tokens.count >= s.top_k;
  if (s.top_p < 1) return tokens.mass >= double(s.top_p) * total;
  if (s.min_p > 0) return s.min_p >= least;
  return tokens.mass > double(s.uniform) * total;
}

// `most` is the largest weight.
int64_t draw(Falling& order, double total, float most, const SampleSettings& s) {
  int kept = order.size();
  if (s.top_k > 0 && s.top_k < kept) kept = order.reach(INFINITY, false, s.top_k, &total);
  if (s.top_p < 1) kept = order.reach(double(s.top_p) * total, false, kept, &total);
  if (s.min_p > 0) {
    const int likely_enough = std::max(1, order.count_from(double(s.min_p) * most));
    if (likely_enough < kept || s.top_p == 1) kept = order.reach(INFINITY, false, std::min(kept, likely_enough), &total);
  }
  double reached;
  return order.last_of(order.reach(double(s.uniform) * total, true, kept, &reached));
}

}  // namespace

int64_t sample_row(const Kernels& kernels, const float* logits, int vocab, const SampleSettings& settings) {
  int64_t best;
  kernels.argmax(logits, vocab, &best, 1, vocab);
  if (settings.temperature == 0 || !(logits[best] > -INFINITY) || settings.top_k == 1) return best;
  float* weights = scratch_of<float>(kTotals, vocab);
  kernels.weights_of_logits(logits, logits[best], settings.temperature, weights, vocab);
  const double total = sum(weights, vocab);
  for (float least : kLevels) {
    const Likely tokens = likely(weights, vocab, least);
    if (!enough(tokens, least, total, settings)) continue;
    if (tokens.count == 0) break;
    Falling order(logits, weights, tokens, logits[best]);
    return draw(order, total, weights[best], settings);
  }
  return best;
}

}  // namespace qiao
