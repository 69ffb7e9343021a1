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

inline void gated(const Rows& x, const Rows& out, int rows, int size, int use_gelu) {
  over_rows(rows, 8L * size, [&](int first, int last) {
    with_type(x.type, [&](auto t) {
      using T = decltype(t);
      for (int r = first; r < last; ++r) {
        const T *gate = row<T>(x, r), *up = gate + size;
        for (int i = 0; i < size; i += W) {
          F g = load_n(gate + i, size - i);
          T rounded[W];  // the sequence of torch operators rounds the activation to the type before the product
          store(rounded, use_gelu ? gelu(g) : silu(g));
          store_n(row<T>(out, r) + i, mul(load(rounded), load_n(up + i, size - i)), size - i);
        }
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

// The lowest id with the highest logit.
inline void argmax(const float* logits, long stride, int64_t* out, int rows, int vocab) {
  auto task = [=](int r) {
    const float* x = logits + r * stride;
    F most = set(x[0]);
    int i = 0;
    for (; i + W <= vocab; i += W) most = max(load(x + i), most);
    float top = highest(most);
    for (; i < vocab; ++i) top = x[i] > top ? x[i] : top;
    int best = 0;
    while (best < vocab - 1 && x[best] != top) ++best;
    out[r] = x[best] == top ? best : 0;
  };
  parallel(rows, task);
}

// e^((logit - highest) / temperature); 0 where that is below the smallest normal number.
inline void weights_of_logits(const float* logits, float highest, float temperature, float* out, int vocab) {
  for (int i = 0; i < vocab; i += W)
    store_n(out + i, exp(div(sub(load_n(logits + i, vocab - i), set(highest)), set(temperature))), vocab - i);
}

}  // namespace QIAO_VARIANT
}  // namespace qiao
