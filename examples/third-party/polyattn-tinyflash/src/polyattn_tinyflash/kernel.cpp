// Softmax attention on a CPU, block by block, in the manner of FlashAttention-2 (Dao 2023): no score matrix is stored.
// The forward keeps a running softmax over blocks of keys (algorithm 1), the backward recomputes the weights from the
// LSE (algorithm 2). Arithmetic is float32; tensors are float32 or bfloat16, with any strides but a dense last axis.
//
// Written against torch's stable ABI: a tenth of the compile time of <torch/extension.h>.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

namespace {

using torch::stable::Tensor;

constexpr float NEVER = -std::numeric_limits<float>::infinity();
constexpr int64_t BLOCK_Q = 64, BLOCK_K = 64;

// ---- arithmetic on small blocks of float32 -------------------------------------------------------------------------

typedef float Lanes __attribute__((vector_size(32), aligned(4), may_alias));
constexpr int64_t WIDTH = 8;            // floats in a Lanes
constexpr int64_t TILE_M = 4, TILE_N = 2 * WIDTH;  // sums kept in registers

int64_t padded(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// c[m, n] += a[m, depth] b[depth, n], with a(i, k) = a[i * a_row + k * a_col]; m and n are multiples of the tile.
void multiply(int64_t m, int64_t n, int64_t depth, const float* a, int64_t a_row, int64_t a_col, const float* b,
              float* c) {
  for (int64_t i = 0; i < m; i += TILE_M) {
    for (int64_t j = 0; j < n; j += TILE_N) {
      Lanes sum[TILE_M][2] = {};
      for (int64_t k = 0; k < depth; ++k) {
        const Lanes b0 = *reinterpret_cast<const Lanes*>(b + k * n + j);
        const Lanes b1 = *reinterpret_cast<const Lanes*>(b + k * n + j + WIDTH);
        for (int64_t r = 0; r < TILE_M; ++r) {
          const float x = a[(i + r) * a_row + k * a_col];
          sum[r][0] += x * b0;
          sum[r][1] += x * b1;
        }
      }
      for (int64_t r = 0; r < TILE_M; ++r) {
        *reinterpret_cast<Lanes*>(c + (i + r) * n + j) += sum[r][0];
        *reinterpret_cast<Lanes*>(c + (i + r) * n + j + WIDTH) += sum[r][1];
      }
    }
  }
}

// e^x for x up to a rounding above 0, good to about 1e-7 of it, and 0 below -87: Cephes' expf, in a form that compilers
// vectorise.
inline float exp_negative(float x) {
  constexpr float to_integer = 12582912.0f;  // 1.5 * 2^23: its sum with n has n in the lowest bits
  const float shifted = x * 1.44269504f + to_integer;
  const float n = shifted - to_integer;
  const float r = x - n * 0.693359375f + n * 2.12194440e-4f;  // x - n ln 2, |r| <= ln 2 / 2
  float y = 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  int32_t bits;
  std::memcpy(&bits, &shifted, 4);
  bits = static_cast<int32_t>(static_cast<uint32_t>(bits + 127) << 23);
  float power;
  std::memcpy(&power, &bits, 4);
  return x < -87.0f ? 0.0f : y * power;
}

// ---- what a call is about ------------------------------------------------------------------------------------------

// One sequence: where its rows start in the tensors, and how many it has.
struct Sequence {
  int64_t batch, q_start, k_start, s_q, s_k;
};

// The rows of one head of one sequence.
template <typename T>
struct Rows {
  T* first;
  int64_t step;
  T* operator[](int64_t i) const { return first + i * step; }
};

// A tensor [B, S, H, D], or [B, S, H] for the LSE; packed tensors have B = 1.
template <typename T>
struct View {
  T* data;
  int64_t batch, row, head;
  explicit View(const Tensor& t)
      : data(static_cast<T*>(t.data_ptr())), batch(t.stride(0)), row(t.stride(1)), head(t.stride(2)) {}
  Rows<T> rows(int64_t b, int64_t start, int64_t h) const { return {data + b * batch + start * row + h * head, row}; }
};

// The arguments that are no tensors. Causal is a right bound of 0: every position rule is an interval of keys.
struct Rule {
  float scale, softcap;
  int64_t left, right;

  int64_t first_key(const Sequence& s, int64_t row) const {
    return left < 0 ? 0 : std::clamp<int64_t>(row + s.s_k - s.s_q - left, 0, s.s_k);
  }
  int64_t end_key(const Sequence& s, int64_t row) const {
    return right < 0 ? s.s_k : std::clamp<int64_t>(row + s.s_k - s.s_q + right + 1, 0, s.s_k);
  }
};

std::vector<Sequence> sequences(const Tensor& q, const Tensor& k, const std::optional<Tensor>& cu_q,
                                const std::optional<Tensor>& cu_k) {
  std::vector<Sequence> found;
  if (!cu_q) {
    for (int64_t b = 0; b < q.size(0); ++b) found.push_back({b, 0, 0, q.size(1), k.size(1)});
    return found;
  }
  const auto* starts_q = static_cast<const int32_t*>(cu_q->data_ptr());
  const auto* starts_k = static_cast<const int32_t*>(cu_k->data_ptr());
  for (int64_t n = 0; n + 1 < cu_q->size(0); ++n) {
    const int64_t q0 = starts_q[n], k0 = starts_k[n];
    found.push_back({0, q0, k0, starts_q[n + 1] - q0, starts_k[n + 1] - k0});
  }
  return found;
}

// to[rows, width] = from[start ... start + count], zeros around it.
template <typename T>
void load(Rows<const T> from, int64_t start, int64_t count, int64_t d, float* to, int64_t rows, int64_t width) {
  for (int64_t i = 0; i < rows; ++i) {
    float* row = to + i * width;
    const T* source = i < count ? from[start + i] : nullptr;
    const int64_t filled = source ? d : 0;
    for (int64_t x = 0; x < filled; ++x) row[x] = static_cast<float>(source[x]);
    std::fill(row + filled, row + width, 0.0f);
  }
}

// to[width, BLOCK_K] = transpose of from[BLOCK_K, width].
void transpose(const float* from, int64_t width, float* to) {
  for (int64_t x0 = 0; x0 < width; x0 += WIDTH) {
    for (int64_t j = 0; j < BLOCK_K; ++j) {
      for (int64_t x = x0; x < x0 + WIDTH; ++x) to[x * BLOCK_K + j] = from[j * width + x];
    }
  }
}

// s[m, BLOCK_K]: scaled and capped logits of query rows row0 ... against keys key0 ..., NEVER where a row does not see
// a key. Rows of padding, from `rows` up to a whole tile, are 0.
void logits(const Rule& rule, const Sequence& seq, const float* q, const float* k_t, int64_t width, int64_t row0,
            int64_t rows, int64_t m, int64_t key0, float* s) {
  std::fill(s, s + m * BLOCK_K, 0.0f);
  multiply(m, BLOCK_K, width, q, width, 1, k_t, s);
  for (int64_t i = 0; i < rows; ++i) {
    float* row = s + i * BLOCK_K;
    for (int64_t j = 0; j < BLOCK_K; ++j) row[j] *= rule.scale;
    if (rule.softcap > 0) {
      for (int64_t j = 0; j < BLOCK_K; ++j) row[j] = rule.softcap * std::tanh(row[j] / rule.softcap);
    }
    const int64_t first = std::clamp<int64_t>(rule.first_key(seq, row0 + i) - key0, 0, BLOCK_K);
    const int64_t end = std::clamp<int64_t>(rule.end_key(seq, row0 + i) - key0, first, BLOCK_K);
    std::fill(row, row + first, NEVER);
    std::fill(row + end, row + BLOCK_K, NEVER);
  }
}

// ---- forward -------------------------------------------------------------------------------------------------------

template <typename T>
void forward_rows(const Rule& rule, const Sequence& seq, Rows<const T> q, Rows<const T> k, Rows<const T> v, Rows<T> out,
                  Rows<float> lse, int64_t d, int64_t d_v, int64_t row0) {
  const int64_t width = padded(d, TILE_N), width_v = padded(d_v, TILE_N);
  const int64_t rows = std::min(BLOCK_Q, seq.s_q - row0), m = padded(rows, TILE_M);
  std::vector<float> memory(m * width + BLOCK_K * (2 * width + width_v) + m * (BLOCK_K + width_v));
  float* q_block = memory.data();
  float* k_block = q_block + m * width;
  float* k_t = k_block + BLOCK_K * width;
  float* v_block = k_t + width * BLOCK_K;
  float* s = v_block + BLOCK_K * width_v;
  float* sum_v = s + m * BLOCK_K;
  float top[BLOCK_Q], total[BLOCK_Q] = {};
  std::fill(top, top + BLOCK_Q, NEVER);

  load(q, row0, rows, d, q_block, m, width);
  // The bounds grow with the row: the block sees what lies between its first row's first key and its last row's last.
  const int64_t end = rule.end_key(seq, row0 + rows - 1);
  for (int64_t key0 = rule.first_key(seq, row0); key0 < end; key0 += BLOCK_K) {
    const int64_t keys = std::min(BLOCK_K, seq.s_k - key0);
    load(k, key0, keys, d, k_block, BLOCK_K, width);
    load(v, key0, keys, d_v, v_block, BLOCK_K, width_v);
    transpose(k_block, width, k_t);
    logits(rule, seq, q_block, k_t, width, row0, rows, m, key0, s);
    for (int64_t i = 0; i < rows; ++i) {
      float* p = s + i * BLOCK_K;
      float higher = top[i], added = 0.0f;
#pragma omp simd reduction(max : higher)
      for (int64_t j = 0; j < BLOCK_K; ++j) higher = p[j] > higher ? p[j] : higher;
      // A row that has seen no key yet: exp(-inf - -inf) would be NaN.
      const float shift = higher == NEVER ? 0.0f : higher;
#pragma omp simd reduction(+ : added)
      for (int64_t j = 0; j < BLOCK_K; ++j) {
        p[j] = exp_negative(p[j] - shift);
        added += p[j];
      }
      const float keep = std::exp(top[i] - shift);
      total[i] = total[i] * keep + added;
      top[i] = higher;
      if (keep != 1.0f) {
        for (int64_t x = 0; x < width_v; ++x) sum_v[i * width_v + x] *= keep;
      }
    }
    multiply(m, width_v, BLOCK_K, s, BLOCK_K, 1, v_block, sum_v);
  }
  for (int64_t i = 0; i < rows; ++i) {
    const bool empty = top[i] == NEVER;
    const float share = empty ? 0.0f : 1.0f / total[i];
    for (int64_t x = 0; x < d_v; ++x) out[row0 + i][x] = static_cast<T>(sum_v[i * width_v + x] * share);
    *lse[row0 + i] = empty ? NEVER : top[i] + std::log(total[i]);
  }
}

template <typename T>
void forward_all(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                 const std::vector<Sequence>& batch, const Rule& rule, int64_t threads) {
  const View<const T> q_all(q), k_all(k), v_all(v);
  const View<T> out_all(out);
  const View<float> lse_all(lse);
  const int64_t heads = q.size(2), group = heads / std::max<int64_t>(k.size(2), 1), d = q.size(3), d_v = v.size(3);
  int64_t blocks = 0;
  for (const Sequence& s : batch) blocks = std::max(blocks, padded(s.s_q, BLOCK_Q) / BLOCK_Q);
  const int64_t count = static_cast<int64_t>(batch.size());
#pragma omp parallel for collapse(3) schedule(dynamic) num_threads(threads)
  for (int64_t n = 0; n < count; ++n) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t block = 0; block < blocks; ++block) {
        const Sequence& s = batch[n];
        if (block * BLOCK_Q >= s.s_q) continue;
        forward_rows<T>(rule, s, q_all.rows(s.batch, s.q_start, h), k_all.rows(s.batch, s.k_start, h / group),
                        v_all.rows(s.batch, s.k_start, h / group), out_all.rows(s.batch, s.q_start, h),
                        lse_all.rows(s.batch, s.q_start, h), d, d_v, block * BLOCK_Q);
      }
    }
  }
}

// ---- backward ------------------------------------------------------------------------------------------------------

// The tensors of a backward call, as views.
template <typename T>
struct Gradients {
  View<const T> dout, q, k, v, out;
  View<const float> lse;
  View<T> dq, dk, dv;
  int64_t group, d, d_v;
};

// Everything that belongs to one key head of one sequence; nobody else writes there, so sums have one order.
template <typename T>
void backward_head(const Rule& rule, const Sequence& seq, const Gradients<T>& g, int64_t kv_head) {
  const int64_t width = padded(g.d, TILE_N), width_v = padded(g.d_v, TILE_N), s_q = padded(seq.s_q, TILE_M);
  const int64_t heads = g.group, first_head = kv_head * g.group;
  const float per_cap = rule.softcap > 0 ? 1.0f / rule.softcap : 0.0f;
  std::vector<float> dq(heads * s_q * width), delta(heads * s_q);
  std::vector<float> memory((BLOCK_Q + 3 * BLOCK_K) * (width + width_v) + 2 * BLOCK_Q * BLOCK_K);
  float* q_block = memory.data();
  float* k_block = q_block + BLOCK_Q * width;
  float* k_t = k_block + BLOCK_K * width;
  float* dk_block = k_t + BLOCK_K * width;
  float* dout_block = dk_block + BLOCK_K * width;
  float* v_block = dout_block + BLOCK_Q * width_v;
  float* v_t = v_block + BLOCK_K * width_v;
  float* dv_block = v_t + BLOCK_K * width_v;
  float* p = dv_block + BLOCK_K * width_v;
  float* ds = p + BLOCK_Q * BLOCK_K;

  for (int64_t h = 0; h < heads; ++h) {
    const Rows<const T> dout = g.dout.rows(seq.batch, seq.q_start, first_head + h);
    const Rows<const T> out = g.out.rows(seq.batch, seq.q_start, first_head + h);
    for (int64_t i = 0; i < seq.s_q; ++i) {
      double sum = 0.0;  // what it is subtracted from may be all but equal to it
      for (int64_t x = 0; x < g.d_v; ++x) sum += static_cast<double>(dout[i][x]) * static_cast<double>(out[i][x]);
      delta[h * s_q + i] = static_cast<float>(sum);
    }
  }
  const Rows<const T> k = g.k.rows(seq.batch, seq.k_start, kv_head), v = g.v.rows(seq.batch, seq.k_start, kv_head);
  const Rows<T> dk = g.dk.rows(seq.batch, seq.k_start, kv_head), dv = g.dv.rows(seq.batch, seq.k_start, kv_head);
  for (int64_t key0 = 0; key0 < seq.s_k; key0 += BLOCK_K) {
    const int64_t keys = std::min(BLOCK_K, seq.s_k - key0);
    load(k, key0, keys, g.d, k_block, BLOCK_K, width);
    load(v, key0, keys, g.d_v, v_block, BLOCK_K, width_v);
    transpose(k_block, width, k_t);
    transpose(v_block, width_v, v_t);
    std::fill(dk_block, dk_block + BLOCK_K * width, 0.0f);
    std::fill(dv_block, dv_block + BLOCK_K * width_v, 0.0f);
    for (int64_t h = 0; h < heads; ++h) {
      const Rows<const T> q = g.q.rows(seq.batch, seq.q_start, first_head + h);
      const Rows<const T> dout = g.dout.rows(seq.batch, seq.q_start, first_head + h);
      const Rows<const float> lse = g.lse.rows(seq.batch, seq.q_start, first_head + h);
      for (int64_t row0 = 0; row0 < seq.s_q; row0 += BLOCK_Q) {
        const int64_t rows = std::min(BLOCK_Q, seq.s_q - row0), m = padded(rows, TILE_M);
        if (rule.end_key(seq, row0 + rows - 1) <= key0 || rule.first_key(seq, row0) >= key0 + keys) continue;
        load(q, row0, rows, g.d, q_block, m, width);
        load(dout, row0, rows, g.d_v, dout_block, m, width_v);
        logits(rule, seq, q_block, k_t, width, row0, rows, m, key0, p);
        std::fill(ds, ds + m * BLOCK_K, 0.0f);
        multiply(m, BLOCK_K, width_v, dout_block, width_v, 1, v_t, ds);  // dP for now
        for (int64_t i = 0; i < rows; ++i) {
          float *weight = p + i * BLOCK_K, *slope = ds + i * BLOCK_K;
          const float total = *lse[row0 + i], row_delta = delta[h * s_q + row0 + i];
          if (total == NEVER) {  // it sees no key at all: exp(-inf - -inf) would be NaN
            std::fill(weight, weight + BLOCK_K, 0.0f);
            std::fill(slope, slope + BLOCK_K, 0.0f);
            continue;
          }
          for (int64_t j = 0; j < BLOCK_K; ++j) {
            const float seen = weight[j] == NEVER ? 0.0f : weight[j];
            const float ratio = seen * per_cap;  // tanh of the logit before the cap, 0 without one
            weight[j] = exp_negative(weight[j] - total);
            slope[j] = weight[j] * (slope[j] - row_delta) * (1.0f - ratio * ratio) * rule.scale;
          }
        }
        multiply(BLOCK_K, width_v, rows, p, 1, BLOCK_K, dout_block, dv_block);
        multiply(BLOCK_K, width, rows, ds, 1, BLOCK_K, q_block, dk_block);
        multiply(m, width, BLOCK_K, ds, BLOCK_K, 1, k_block, dq.data() + (h * s_q + row0) * width);
      }
    }
    for (int64_t j = 0; j < keys; ++j) {
      for (int64_t x = 0; x < g.d; ++x) dk[key0 + j][x] = static_cast<T>(dk_block[j * width + x]);
      for (int64_t x = 0; x < g.d_v; ++x) dv[key0 + j][x] = static_cast<T>(dv_block[j * width_v + x]);
    }
  }
  for (int64_t h = 0; h < heads; ++h) {
    const Rows<T> to = g.dq.rows(seq.batch, seq.q_start, first_head + h);
    for (int64_t i = 0; i < seq.s_q; ++i) {
      for (int64_t x = 0; x < g.d; ++x) to[i][x] = static_cast<T>(dq[(h * s_q + i) * width + x]);
    }
  }
}

template <typename T>
void backward_all(const Gradients<T>& g, int64_t kv_heads, const std::vector<Sequence>& batch, const Rule& rule,
                  int64_t threads) {
  const int64_t count = static_cast<int64_t>(batch.size());
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads)
  for (int64_t n = 0; n < count; ++n) {
    for (int64_t h = 0; h < kv_heads; ++h) backward_head<T>(rule, batch[n], g, h);
  }
}

// ---- the two operators ---------------------------------------------------------------------------------------------

// q [B, S_q, H_q, D], k [B, S_k, H_kv, D], v [B, S_k, H_kv, D_v], out [B, S_q, H_q, D_v] of one dtype, each with a
// dense last axis; lse [B, S_q, H_q] float32. Packed: B = 1, and cu_q, cu_k int32 [N + 1], contiguous. softcap 0 = off;
// left and right count keys beside a query's own position, bottom-right aligned, -1 = no bound.
void forward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, std::optional<Tensor> cu_q,
             std::optional<Tensor> cu_k, double scale, double softcap, int64_t left, int64_t right, int64_t threads) {
  const Rule rule{static_cast<float>(scale), static_cast<float>(softcap), left, right};
  const auto run = q.scalar_type() == torch::headeronly::ScalarType::BFloat16 ? forward_all<c10::BFloat16>
                                                                               : forward_all<float>;
  run(q, k, v, out, lse, sequences(q, k, cu_q, cu_k), rule, threads);
}

template <typename T>
void backward_typed(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                    const Tensor& lse, const Tensor& dq, const Tensor& dk, const Tensor& dv,
                    const std::vector<Sequence>& batch, const Rule& rule, int64_t threads) {
  const int64_t kv_heads = k.size(2), group = q.size(2) / std::max<int64_t>(kv_heads, 1);
  const Gradients<T> g{View<const T>(dout), View<const T>(q), View<const T>(k),  View<const T>(v),
                       View<const T>(out),  View<const float>(lse), View<T>(dq), View<T>(dk),
                       View<T>(dv),         group,            q.size(3),         v.size(3)};
  backward_all<T>(g, kv_heads, batch, rule, threads);
}

// The same, with dout and out like the forward's output; lse may be that of a merged result of which this is a part.
void backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor dq, Tensor dk, Tensor dv,
              std::optional<Tensor> cu_q, std::optional<Tensor> cu_k, double scale, double softcap, int64_t left,
              int64_t right, int64_t threads) {
  const Rule rule{static_cast<float>(scale), static_cast<float>(softcap), left, right};
  const auto run = q.scalar_type() == torch::headeronly::ScalarType::BFloat16 ? backward_typed<c10::BFloat16>
                                                                               : backward_typed<float>;
  run(dout, q, k, v, out, lse, dq, dk, dv, sequences(q, k, cu_q, cu_k), rule, threads);
}

}  // namespace

STABLE_TORCH_LIBRARY(polyattn_tinyflash, m) {
  m.def(
      "forward(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) lse, Tensor? cu_q, Tensor? cu_k, "
      "float scale, float softcap, int left, int right, int threads) -> ()");
  m.def(
      "backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor(a!) dq, Tensor(b!) dk, "
      "Tensor(c!) dv, Tensor? cu_q, Tensor? cu_k, float scale, float softcap, int left, int right, int threads) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(polyattn_tinyflash, CPU, m) {
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("backward", TORCH_BOX(&backward));
}
