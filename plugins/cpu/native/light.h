// Norms, rotation, gates and single elements.
#pragma once
#include <atomic>

#include "cache.h"

namespace qiao {
namespace QIAO_VARIANT {

// x, or x + residual rounded to the residual's type and stored there, as float; returns the sum of squares.
template <class T>
inline float sum_squares(const T* x, T* residual, float* out, int size) {
  F squares = zero();
  for (int i = 0; i < size; i += W) {
    F value = load_n(x + i, size - i);
    if (residual) {
      store_n(residual + i, add(load_n(residual + i, size - i), value), size - i);
      value = load_n(residual + i, size - i);
    }
    store(out + i, value);
    squares = fma(value, value, squares);
  }
  return sum(squares);
}

inline void norm(const Rows& x, const Rows& residual, const Rows& weight, const Rows& out, int rows, int size, float eps) {
  over_rows(rows, 4L * size, [&](int first, int last) {
    float* wide = scratch_of<float>(kPanel, round_up(size, W));
    for (int r = first; r < last; ++r)
      with_type(x.type, [&](auto t) {
        using T = decltype(t);
        const float squares = sum_squares(row<T>(x, r), residual.data ? row<T>(residual, r) : nullptr, wide, size);
        const F factor = div(set(1.0f), sqrt(set(squares / float(size) + eps)));
        with_type(weight.type, [&](auto w) {
          const auto* gain = row<decltype(w)>(weight, 0);
          for (int i = 0; i < size; i += W)
            store_n(row<T>(out, r) + i, mul(mul(load(wide + i), factor), load_n(gain + i, size - i)), size - i);
        });
      });
  });
}

// silu(g) = g / (1 + e^-g); gelu(g) in its tanh form (arXiv 1606.08415, section 2).
inline F silu(F g) { return div(g, add(set(1.0f), exp(sub(zero(), g)))); }
inline F gelu(F g) {
  F cube = mul(mul(g, g), g);
  F inner = mul(set(0.7978845608f), fma(set(0.044715f), cube, g));
  return mul(mul(set(0.5f), g), add(set(1.0f), tanh(inner)));
}

// The sequence of torch operators rounds the activation to the type before the product.
template <bool Gelu, class T>
inline void gated_row(const T* gate, const T* up, T* out, int size) {
  for (int i = 0; i < size; i += W) {
    const int n = size - i;
    const F g = load_n(gate + i, n), activated = rounded(Gelu ? gelu(g) : silu(g), T{});
    store_n(out + i, mul(activated, load_n(up + i, n)), n);
  }
}

inline void gated(const Rows& x, const Rows& out, int rows, int size, int use_gelu) {
  over_rows(rows, 8L * size, [&](int first, int last) {
    with_type(x.type, [&](auto t) {
      using T = decltype(t);
      for (int r = first; r < last; ++r) {
        const T* gate = row<T>(x, r);
        if (use_gelu) gated_row<true>(gate, gate + size, row<T>(out, r), size);
        else gated_row<false>(gate, gate + size, row<T>(out, r), size);
      }
    });
  });
}

// The first n lanes at element i of a row of any type, and back.
inline F load_any(const Rows& x, long r, int i, int n) {
  if (x.type == kFloat32) return load_n(row<float>(x, r) + i, n);
  return x.type == kBFloat16 ? load_n(row<bf16>(x, r) + i, n) : load_n(row<f16>(x, r) + i, n);
}
inline void store_any(const Rows& out, long r, int i, F value, int n) {
  with_type(out.type, [&](auto t) { store_n(row<decltype(t)>(out, r) + i, value, n); });
}

// out[r][i] = function(r, i, n) for vectors of n lanes from i; long rows are cut, so that one row feeds all threads.
template <class Function>
inline void each_element(const Rows& out, int rows, int size, Function&& function) {
  constexpr int piece = 8192;
  const int pieces = larger(1, (size + piece - 1) / piece);
  over_rows(rows * pieces, 2L * smaller(size, piece), [&](int first, int last) {
    for (int task = first; task < last; ++task) {
      const int r = task / pieces, from = task % pieces * piece, to = smaller(size, from + piece);
      for (int i = from; i < to; i += W) store_any(out, r, i, function(r, i, to - i), to - i);
    }
  });
}

inline void convert(const Rows& x, const Rows& out, int rows, int size) {
  each_element(out, rows, size, [&](int r, int i, int n) { return load_any(x, r, i, n); });
}
inline void scale(const Rows& x, float factor, const Rows& out, int rows, int size) {
  each_element(out, rows, size, [&](int r, int i, int n) { return mul(load_any(x, r, i, n), set(factor)); });
}
inline void add_rows(const Rows& x, const Rows& y, const Rows& out, int rows, int size) {
  each_element(out, rows, size, [&](int r, int i, int n) { return add(load_any(x, r, i, n), load_any(y, r, i, n)); });
}
inline void soft_cap(const Rows& x, float cap, const Rows& out, int rows, int size) {
  const F limit = set(cap);
  each_element(out, rows, size, [&](int r, int i, int n) { return mul(limit, tanh(div(load_any(x, r, i, n), limit))); });
}

inline int gather_rows(const void* table, long table_rows, long table_stride, long row_bytes, const int64_t* ids, void* out, int rows) {
  std::atomic<int> outside{0};
  over_rows(rows, row_bytes / 2, [&](int first, int last) {
    for (int r = first; r < last; ++r) {
      char* to = static_cast<char*>(out) + r * row_bytes;
      if (ids[r] >= 0 && ids[r] < table_rows) {
        memcpy(to, static_cast<const char*>(table) + ids[r] * table_stride, row_bytes);
      } else {
        memset(to, 0, row_bytes);
        outside.fetch_add(1, std::memory_order_relaxed);
      }
    }
  });
  return outside.load();
}

// Rotates one head in place: pairs (i, i + R/2), or (2i, 2i + 1) where interleaved (arXiv 2104.09864, equation 34).
template <class T>
inline void rotate_halves(T* head, const float* cos, const float* sin, int pairs) {
  for (int i = 0; i < pairs; i += W) {
    const int n = pairs - i;
    F a = load_n(head + i, n), b = load_n(head + pairs + i, n), c = load_n(cos + i, n), s = load_n(sin + i, n);
    F first = sub(mul(a, c), mul(b, s)), second = add(mul(b, c), mul(a, s));
    store_n(head + i, first, n);
    store_n(head + pairs + i, second, n);
  }
}

template <class T>
inline void rotate_neighbours(T* head, const float* cos, const float* sin, int pairs) {
  for (int i = 0; i < pairs; i += W) {
    const int n = smaller(W, pairs - i);
    float a[W] = {}, b[W] = {};
    for (int j = 0; j < n; ++j) {
      a[j] = to_float(head[2 * (i + j)]);
      b[j] = to_float(head[2 * (i + j) + 1]);
    }
    F c = load_n(cos + i, n), s = load_n(sin + i, n);
    T first[W], second[W];
    store(first, sub(mul(load(a), c), mul(load(b), s)));
    store(second, add(mul(load(b), c), mul(load(a), s)));
    for (int j = 0; j < n; ++j) {
      head[2 * (i + j)] = first[j];
      head[2 * (i + j) + 1] = second[j];
    }
  }
}

inline void rotate(const Heads& h, const RotaryArgs& a, int token, int heads) {
  const float *cos = a.cos + token * a.cos_stride, *sin = a.sin + token * a.sin_stride;
  with_type(h.type, [&](auto t) {
    for (int i = 0; i < heads; ++i) {
      auto* head = head_of<decltype(t)>(h, token, i);
      if (a.interleaved) rotate_neighbours(head, cos, sin, a.rotated / 2);
      else rotate_halves(head, cos, sin, a.rotated / 2);
    }
  });
}

inline void rotary(const RotaryArgs& a) {
  over_rows(a.tokens, 4L * (a.heads + 2 * a.kv_heads) * a.size, [&](int first, int last) {
    for (int t = first; t < last; ++t) {
      rotate(a.query, a, t, a.heads);
      rotate(a.key, a, t, a.kv_heads);
      if (a.value.data) write_token(a.key, a.value, a.cache, a.slots[t], t);
    }
  });
}

constexpr int kPiece = 8192;  // logits of a task where rows are fewer than threads

struct Peak {
  float value;
  int at;
};

// The highest of x[from .. to) and the lowest place of it; numbers that are not are passed over.
inline Peak peak_of(const float* x, int from, int to) {
  constexpr int block = 32 * W;
  Peak best = {-__builtin_inff(), from};
  for (int at = from; at < to; at += block) {
    const int end = smaller(to, at + block);
    F most[4];
    for (auto& m : most) m = set(-__builtin_inff());
    int i = at;
    for (; i + 4 * W <= end; i += 4 * W)
      for (int v = 0; v < 4; ++v) most[v] = max(load(x + i + v * W), most[v]);
    float top = highest(max(max(most[0], most[1]), max(most[2], most[3])));
    for (; i < end; ++i) top = x[i] > top ? x[i] : top;
    if (top > best.value) best = {top, at};
  }
  for (int i = best.at; i < to; ++i)
    if (x[i] == best.value) return {best.value, i};
  return {best.value, from};
}

// The lowest id with the highest logit.
inline void argmax(const float* logits, long stride, int64_t* out, int rows, int vocab) {
  const int pieces = rows < threads() ? (vocab + kPiece - 1) / kPiece : 1, size = (vocab + pieces - 1) / pieces;
  Peak* found = scratch_of<Peak>(kPartial, long(rows) * pieces);
  auto task = [=](int i) { found[i] = peak_of(logits + i / pieces * stride, i % pieces * size, smaller(vocab, (i % pieces + 1) * size)); };
  parallel(rows * pieces, task);
  for (int r = 0; r < rows; ++r, found += pieces) {
    Peak best = found[0];
    for (int i = 1; i < pieces; ++i) if (found[i].value > best.value) best = found[i];
    out[r] = best.at;
  }
}

// e^((logit - highest) / temperature); 0 where that is below the smallest normal number.
inline void weights_of_logits(const float* logits, float highest, float temperature, float* out, int vocab) {
  const F top = set(highest), unit = set(temperature);
  auto task = [=](int piece) {
    const int end = smaller(vocab, (piece + 1) * kPiece);
    for (int i = piece * kPiece; i < end; i += W) {
      const int n = smaller(W, end - i);
      store_n(out + i, exp(div(sub(load_n(logits + i, n), top), unit)), n);
    }
  };
  parallel((vocab + kPiece - 1) / kPiece, task);
}

}  // namespace QIAO_VARIANT
}  // namespace qiao
