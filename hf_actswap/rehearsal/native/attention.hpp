// Fused attention, which PyTorch's CPU kernels have in another form, forward and backward.
#pragma once
#include <ATen/ATen.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "cpu_memory.hpp"
#include "random.hpp"

namespace rehearsal {

// Where an op has what, by the number of the argument or result; -1: it has none.
struct AttentionOp {
  bool backward;
  bool tokens_first;  // (batch, tokens, heads, size) and not (batch, heads, tokens, size)
  int query, bias, out, statistics, dropout, causal, lengths_q, lengths_k, window;
  int seed, offset;  // forward: of the results; backward: of the arguments
  bool causal_is_mask_type;  // of CUTLASS: 0 none, 1 from the top left, 2 from the bottom right
  int bias_gradient;         // number of the result
};

inline const AttentionOp* attention_of(const std::string& name) {
  // clang-format off
  static const auto* all = new std::map<std::string, AttentionOp>{
      {"aten::_scaled_dot_product_flash_attention",              {false, false, 0, -1, 0, 1, 3, 4, -1, -1, -1, 6, -1, false, -1}},
      {"aten::_scaled_dot_product_flash_attention_backward",     {true,  false, 1, -1, 4, 5, 10, 11, -1, -1, -1, 12, 13, false, -1}},
      {"aten::_scaled_dot_product_efficient_attention",          {false, false, 0, 3, 0, 1, 5, 6, -1, -1, -1, 2, 3, false, -1}},
      {"aten::_scaled_dot_product_efficient_attention_backward", {true,  false, 1, 4, 5, 6, 9, 11, -1, -1, -1, 7, 8, false, 3}},
      {"aten::_scaled_dot_product_cudnn_attention",              {false, false, 0, 3, 0, 1, 5, 6, -1, -1, -1, 6, 7, false, -1}},
      {"aten::_scaled_dot_product_cudnn_attention_backward",     {true,  false, 1, 8, 4, 5, 13, 14, -1, -1, -1, 6, 7, false, -1}},
      {"aten::_flash_attention_forward",                         {false, true, 0, -1, 0, 1, 7, 8, 3, 4, 11, 2, -1, false, -1}},
      {"aten::_flash_attention_backward",                        {true,  true, 1, -1, 4, 5, 10, 11, 6, 7, 15, 12, 13, false, -1}},
      {"aten::_efficient_attention_forward",                     {false, true, 0, 3, 0, 1, 8, 9, 4, 5, -1, 2, 3, true, -1}},
      {"aten::_efficient_attention_backward",                    {true,  true, 1, 4, 5, 10, 11, 14, 6, 7, -1, 12, 13, true, 3}},
  };
  // clang-format on
  auto found = all->find(name);
  return found == all->end() ? nullptr : &found->second;
}

// Two products forward, five backward; half of them where attention is causal.
inline double attention_flop(const AttentionOp& op, const Stack& given) {
  const at::Tensor &q = given[op.query].toTensor(), &k = given[op.query + 1].toTensor();
  int64_t tokens = op.tokens_first ? -3 : -2;
  bool causal = given[op.causal].isBool() ? given[op.causal].toBool() : given[op.causal].toInt() != 0;
  return (op.backward ? 10.0 : 4.0) * (double)q.numel() * (double)k.size(tokens) / (causal ? 2 : 1);
}

// One call of attention over heads of whole sequences: tensors of (batch, heads, tokens, size).
struct Attend {
  at::Tensor q, k, v, mask;
  double scale, dropout;
  std::optional<at::Generator> generator;

  int64_t groups() const { return q.size(1) / k.size(1); }
  at::Tensor spread(const at::Tensor& t) const { return groups() == 1 ? t : t.repeat_interleave(groups(), 1); }
  at::Tensor gathered(const at::Tensor& t) const {
    return groups() == 1 ? t : t.unflatten(1, {k.size(1), groups()}).sum(2);
  }

  at::Tensor scores() const {
    at::Tensor all = at::matmul(q.to(at::kFloat), spread(k).to(at::kFloat).transpose(-2, -1)).mul_(scale);
    return mask.defined() ? all.add_(mask) : all;
  }

  at::Tensor factors(const at::Tensor& like) const {
    at::Tensor kept = at::empty_like(like).bernoulli_(1 - dropout, generator);
    return kept.div_(1 - dropout);
  }

  std::pair<at::Tensor, at::Tensor> forward() const {
    at::Tensor all = scores();
    at::Tensor statistics = all.logsumexp(-1);
    at::Tensor weights = all.sub_(statistics.unsqueeze(-1)).exp_().nan_to_num_(0.0);
    if (dropout > 0) weights = weights * factors(weights);
    return {at::matmul(weights, spread(v).to(at::kFloat)), statistics};
  }

  // Gradients of q, k, v and of the scores with their mask.
  std::vector<at::Tensor> backward(const at::Tensor& gradient, const at::Tensor& out, const at::Tensor& statistics) const {
    at::Tensor weights = scores().sub_(statistics.unsqueeze(-1)).exp_().nan_to_num_(0.0);
    at::Tensor g = gradient.to(at::kFloat);
    at::Tensor kept = dropout > 0 ? factors(weights) : at::Tensor();
    at::Tensor to_v = at::matmul((kept.defined() ? weights * kept : weights).transpose(-2, -1), g);
    at::Tensor to_weights = at::matmul(g, spread(v).to(at::kFloat).transpose(-2, -1));
    if (kept.defined()) to_weights.mul_(kept);
    at::Tensor delta = (g * out.to(at::kFloat)).sum(-1, true);
    at::Tensor to_scores = to_weights.sub_(delta).mul_(weights);
    at::Tensor to_q = at::matmul(to_scores, spread(k).to(at::kFloat)).mul_(scale);
    at::Tensor to_k = at::matmul(to_scores.transpose(-2, -1), q.to(at::kFloat)).mul_(scale);
    return {to_q, gathered(to_k), gathered(to_v), to_scores};
  }
};

// What the positions may see, as numbers to add to the scores; undefined: everything.
inline at::Tensor seen(int64_t queries, int64_t keys, int causal, int64_t left, int64_t right) {
  if (!causal && left < 0 && right < 0) return at::Tensor();
  auto row = at::arange(queries).unsqueeze(1), column = at::arange(keys).unsqueeze(0);
  int64_t shift = causal == 1 ? 0 : keys - queries;  // from the top left, or from the bottom right
  at::Tensor hidden = at::zeros({queries, keys}, at::kBool);
  if (causal) hidden |= column > row + shift;
  else if (right >= 0) hidden |= column > row + shift + right;
  if (left >= 0) hidden |= column < row + shift - left;
  return at::zeros({queries, keys}).masked_fill_(hidden, -INFINITY);
}

inline void remember(const RandomState& random, const at::Tensor& seed, const at::Tensor& offset) {
  if (!seed.defined() || !seed.is_cuda()) return;
  if (seed.numel() >= 1) *(uint64_t*)seed.unsafeGetTensorImpl()->mutable_data() = random.seed;
  if (seed.numel() >= 2) ((uint64_t*)seed.unsafeGetTensorImpl()->mutable_data())[1] = random.offset;
  if (offset.defined() && offset.is_cuda() && offset.numel() >= 1)
    *(uint64_t*)offset.unsafeGetTensorImpl()->mutable_data() = random.offset;
}

inline RandomState remembered(const at::Tensor& seed, const at::Tensor& offset) {
  RandomState found;
  if (!seed.defined() || !seed.numel()) return found;
  const auto* numbers = (const uint64_t*)seed.unsafeGetTensorImpl()->data();
  found.seed = numbers[0];
  if (seed.numel() >= 2) found.offset = numbers[1];
  else if (offset.defined() && offset.numel()) found.offset = *(const uint64_t*)offset.unsafeGetTensorImpl()->data();
  return found;
}

inline at::Tensor tensor_at(const Stack& values, int number) {
  return number >= 0 && values[number].isTensor() ? values[number].toTensor() : at::Tensor();
}

class FusedAttention {
 public:
  FusedAttention(const AttentionOp& op, const Stack& given, const Stack& results, RandomState random)
      : op_(op), given_(given), results_(results), random_(random) {
    q_ = heads_first(tensor_at(given, op.query));
    k_ = heads_first(tensor_at(given, op.query + 1));
    v_ = heads_first(tensor_at(given, op.query + 2));
    bias_ = cpu_alias(tensor_at(given, op.bias));
    if (bias_.defined() && !bias_.numel()) bias_ = at::Tensor();
    dropout_ = given[op.dropout].toDouble();
    causal_ = op.causal_is_mask_type ? (int)given[op.causal].toInt() : given[op.causal].toBool() ? kind_of_causal() : 0;
    scale_ = given_scale().value_or(1 / std::sqrt((double)q_.size(3)));
    const Stack& holder = op.backward ? given : results;
    at::Tensor seed = tensor_at(holder, op.seed), offset = tensor_at(holder, op.offset);
    if (!op.backward) remember(random_, seed, offset);
    if (dropout_ > 0) random_ = remembered(seed, offset);
  }

  void run() {
    at::Tensor lengths_q = cpu_alias(tensor_at(given_, op_.lengths_q)), lengths_k = cpu_alias(tensor_at(given_, op_.lengths_k));
    bool packed = op_.lengths_q >= 0 && lengths_q.defined() && lengths_q.numel() > 0;
    prepare(packed);
    if (!packed) {
      piece(0, q_.size(2), 0, k_.size(2), 0);
      return;
    }
    for (int64_t i = 0; i + 1 < lengths_q.numel(); i++)
      piece(lengths_q[i].item<int64_t>(), lengths_q[i + 1].item<int64_t>(), lengths_k[i].item<int64_t>(),
            lengths_k[i + 1].item<int64_t>(), i);
  }

 private:
  // FlashAttention looks from the bottom right; through scaled_dot_product_attention lengths are equal.
  int kind_of_causal() const { return op_.tokens_first ? 2 : 1; }

  // `scale` is the first argument with a fraction behind those that have a place.
  std::optional<double> given_scale() const {
    int last = std::max(op_.dropout, op_.causal);
    for (size_t i = (size_t)last + 1; i < given_.size(); i++)
      if (given_[i].isDouble()) return given_[i].toDouble();
    return std::nullopt;
  }

  at::Tensor heads_first(const at::Tensor& tensor) const {
    at::Tensor cpu = cpu_alias(tensor);
    if (!op_.tokens_first) return cpu;
    if (cpu.dim() == 3) cpu = cpu.unsqueeze(0);
    return cpu.transpose(1, 2);
  }

  // Statistics of CUTLASS are padded to 32 tokens, cuDNN's have another axis.
  at::Tensor statistics(const Stack& holder, int number) const {
    at::Tensor cpu = cpu_alias(tensor_at(holder, number));
    if (!cpu.defined() || !cpu.numel()) return at::Tensor();
    if (cpu.dim() == 4) cpu = cpu.squeeze(-1);
    if (cpu.dim() == 2) cpu = cpu.unsqueeze(0);
    return cpu;
  }

  void prepare(bool packed) {
    statistics_ = op_.backward ? statistics(given_, op_.statistics) : statistics(results_, op_.statistics);
    by_sequence_ = packed && statistics_.defined() && statistics_.size(0) != q_.size(0);
    if (op_.backward) {
      out_ = heads_first(tensor_at(given_, op_.out));
      gradient_ = heads_first(tensor_at(given_, 0));
      for (int i = 0; i < 3; i++) {
        to_.push_back(heads_first(tensor_at(results_, i)));
        if (to_[i].defined() && to_[i].numel()) to_[i].zero_();
      }
    } else {
      out_ = heads_first(tensor_at(results_, op_.out));
    }
  }

  at::Tensor statistics_of(int64_t from, int64_t to, int64_t sequence) const {
    if (!statistics_.defined()) return statistics_;
    if (by_sequence_) return statistics_.narrow(0, sequence, 1).narrow(2, 0, to - from);
    return statistics_.narrow(2, from, to - from);
  }

  void piece(int64_t q_from, int64_t q_to, int64_t k_from, int64_t k_to, int64_t sequence) {
    int64_t queries = q_to - q_from, keys = k_to - k_from;
    if (!queries) return;
    Attend attend{q_.narrow(2, q_from, queries), k_.narrow(2, k_from, keys), v_.narrow(2, k_from, keys), {}, scale_, dropout_, {}};
    int64_t left = window(0), right = window(1);
    attend.mask = seen(queries, keys, causal_, left, right);
    if (bias_.defined()) {
      at::Tensor bias = bias_.scalar_type() == at::kBool ? at::zeros_like(bias_, at::kFloat).masked_fill_(bias_.logical_not(), -INFINITY)
                                                         : bias_.to(at::kFloat);
      attend.mask = attend.mask.defined() ? attend.mask + bias : bias;
    }
    if (dropout_ > 0) attend.generator = random_.generator();
    at::Tensor statistics = statistics_of(q_from, q_to, sequence), out = out_.narrow(2, q_from, queries);
    if (!op_.backward) {
      auto [values, sums] = attend.forward();
      out.copy_(values);
      if (statistics.defined()) statistics.copy_(sums);
      return;
    }
    auto found = attend.backward(gradient_.narrow(2, q_from, queries), out, statistics);
    if (to_[0].numel()) to_[0].narrow(2, q_from, queries).copy_(found[0]);
    if (to_[1].numel()) to_[1].narrow(2, k_from, keys).copy_(found[1]);
    if (to_[2].numel()) to_[2].narrow(2, k_from, keys).copy_(found[2]);
    at::Tensor to_bias = op_.bias_gradient >= 0 ? cpu_alias(tensor_at(results_, op_.bias_gradient)) : at::Tensor();
    if (to_bias.defined() && to_bias.numel()) to_bias.copy_(found[3].sum_to_size(to_bias.sizes()));
  }

  int64_t window(int side) const {
    if (op_.window < 0 || op_.window + side >= (int)given_.size()) return -1;
    const c10::IValue& value = given_[op_.window + side];
    return value.isInt() ? value.toInt() : -1;
  }

  const AttentionOp& op_;
  const Stack &given_, &results_;
  RandomState random_;
  at::Tensor q_, k_, v_, bias_, out_, gradient_, statistics_;
  std::vector<at::Tensor> to_;
  double dropout_ = 0, scale_ = 1;
  int causal_ = 0;
  bool by_sequence_ = false;
};

inline bool is_of_cudnn(const std::string& name) { return name.rfind("aten::_scaled_dot_product_cudnn_attention", 0) == 0; }

// What cuDNN's attention returns, without cuDNN, which needs a real device: memory without values. Sizes and layout are
// those of PyTorch's kernel, whose outputs have the layout of their inputs.
inline Stack results_of_cudnn(const AttentionOp& op, const Stack& given, const RandomState& random) {
  const at::Tensor &q = given[op.query].toTensor(), &k = given[op.query + 1].toTensor(), &v = given[op.query + 2].toTensor();
  if (op.backward) return {at::empty_like(q), at::empty_like(k), at::empty_like(v)};
  auto numbers = q.options().dtype(at::kLong);
  at::Tensor out = q.size(3) == v.size(3) ? at::empty_like(q) : at::empty({q.size(0), q.size(1), q.size(2), v.size(3)}, q.options());
  at::Tensor statistics = given[4].toBool() ? at::empty({q.size(0), q.size(1), q.size(2), 1}, q.options().dtype(at::kFloat)) : at::Tensor();
  if (given[op.dropout].toDouble() > 0) random.advance(q.device().index());
  return {out, statistics, at::Tensor(), at::Tensor(), q.size(2), k.size(2), at::empty({}, numbers), at::empty({}, numbers), at::Tensor()};
}

inline void compute_attention(const AttentionOp& op, const Stack& given, const Stack& results, const RandomState& random) {
  FusedAttention(op, given, results, random).run();
}

inline void compute_dropout(const Stack& given, const Stack& results, const RandomState& random) {
  at::Tensor input = cpu_alias(given[0].toTensor());
  at::Tensor out = cpu_alias(results[0].toTensor()), mask = cpu_alias(results[1].toTensor());
  double p = given[1].toDouble();
  bool fused = results[1].toTensor().scalar_type() == at::kByte;  // `_fused_dropout`: p is the share that stays
  double kept = fused ? p : 1 - p;
  bool train = fused || given.size() < 3 || !given[2].isBool() || given[2].toBool();
  if (!train) {
    out.copy_(input);
    mask.fill_(1);
    return;
  }
  at::Tensor chosen = at::empty(input.sizes(), at::kFloat);
  chosen.bernoulli_(kept, random.generator());
  mask.copy_(chosen);
  out.copy_(kept > 0 ? chosen.mul_(input).div_(kept) : at::zeros_like(chosen));
}

}  // namespace rehearsal
