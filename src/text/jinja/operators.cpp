#include "text/jinja/operators.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace ekv::jinja {
namespace {

constexpr Int kExactReal = Int(1) << 53;

const char* symbol(Op op) {
  static constexpr const char* kSymbols[] = {"", "+", "-", "*", "/", "//", "%", "**"};
  return kSymbols[size_t(op)];
}

[[noreturn]] void fail_operands(Op op, const Value& a, const Value& b) {
  fail(fmt::format("unsupported operands for {}: {} and {}", symbol(op), type_name(a), type_name(b)));
}

Int floor_div(Int a, Int b) {
  const Int q = a / b;
  return a % b != 0 && (a % b < 0) != (b < 0) ? q - 1 : q;
}

// True division is rounded once; beyond 2^53 the quotient of two doubles could differ.
double true_div(Int a, Int b) {
  const auto big = [](Int i) { return i > kExactReal || i < -kExactReal; };
  if (big(a) || big(b)) fail_unsupported("division of integers beyond 2^53 is not supported");
  return double(a) / double(b);
}

Value int_product(Int a, Int b) {
  Int product;
  if (__builtin_mul_overflow(a, b, &product)) fail_unsupported("an integer does not fit in 64 bits");
  return make_int(product);
}

// Factors are at least 2 in size here, so at most 64 rounds pass before the product overflows.
Value int_pow(Int base, Int exponent) {
  Value result = make_int(1);
  for (Int i = 0; i < exponent; ++i) result = int_product(result.integer, base);
  return result;
}

Value power(const Value& a, const Value& b) {
  if (a.is_integral() && b.is_integral()) {
    const Int base = a.as_int(), e = b.as_int();
    if (e >= 0)
      return base == 0 || base == 1 || base == -1 ? make_int(e == 0                     ? 1
                                                             : base == -1 && e % 2 == 0 ? 1
                                                                                        : base)
                                                  : int_pow(base, e);
    if (base == 0) fail("0 cannot be raised to a negative power");
  }
  const double x = a.as_real(), y = b.as_real();
  if (x == 0 && y < 0) fail("0.0 cannot be raised to a negative power");
  if (x < 0 && std::floor(y) != y && std::isfinite(x) && std::isfinite(y))
    fail_unsupported("complex numbers are not supported");
  const double result = std::pow(x, y);
  if (std::isinf(result) && std::isfinite(x) && std::isfinite(y)) fail("the result of ** is too large");
  return make_real(result);
}

// Python's float % takes the sign of the divisor, and // is consistent with it.
double real_mod(double a, double b) {
  double m = std::fmod(a, b);
  if (m != 0 && (b < 0) != (m < 0)) m += b;
  return m == 0 ? std::copysign(0.0, b) : m;
}

double real_floordiv(double a, double b) {
  const double m = std::fmod(a, b);
  double q = (a - m) / b;
  if (m != 0 && (b < 0) != (m < 0)) q -= 1;
  if (q == 0) return std::copysign(0.0, a / b);
  const double f = std::floor(q);
  return q - f > 0.5 ? f + 1 : f;
}

Value int_arithmetic(Op op, Int a, Int b) {
  if (b == 0 && (op == Op::div || op == Op::floordiv || op == Op::mod)) fail("division by zero");
  switch (op) {
    case Op::add:
      return make_int(a + b);
    case Op::sub:
      return make_int(a - b);
    case Op::mul:
      return int_product(a, b);
    case Op::div:
      return make_real(true_div(a, b));
    case Op::floordiv:
      return make_int(floor_div(a, b));
    default:
      return make_int(a - floor_div(a, b) * b);
  }
}

Value arithmetic(Op op, const Value& a, const Value& b) {
  if (op == Op::pow) return power(a, b);
  if (a.is_integral() && b.is_integral()) return int_arithmetic(op, a.as_int(), b.as_int());
  const double x = a.as_real(), y = b.as_real();
  if (y == 0 && (op == Op::div || op == Op::floordiv || op == Op::mod)) fail("division by zero");
  switch (op) {
    case Op::add:
      return make_real(x + y);
    case Op::sub:
      return make_real(x - y);
    case Op::mul:
      return make_real(x * y);
    case Op::div:
      return make_real(x / y);
    case Op::floordiv:
      return make_real(real_floordiv(x, y));
    default:
      return make_real(real_mod(x, y));
  }
}

Value repeat(Runtime& rt, const Value& sequence, Int times) {
  const size_t n = times > 0 ? size_t(std::min<Int>(times, Int(kMaxTextBytes) + 1)) : 0;
  const size_t unit = sequence.is(Kind::string) ? sequence.text.size : sequence.list->size;
  if (unit > 0 && n > kMaxTextBytes / unit) throw Failure{"the result of * is too large", Error::too_large};
  rt.budget.spend(unit * n / 64);
  if (sequence.is(Kind::string)) {
    std::string out;
    for (size_t i = 0; unit && i < n; ++i) out += sequence.str();
    Value v = rt.text(out);
    v.markup = sequence.markup;
    return v;
  }
  rt.budget.spend(unit * n);
  std::vector<Value> items;
  for (size_t i = 0; unit && i < n; ++i)
    items.insert(items.end(), sequence.list->items, sequence.list->items + sequence.list->size);
  return rt.list(items, sequence.list->kind);
}

bool is_plain_list(const Value& v) {
  return v.is(Kind::list) && (v.list->kind == ListKind::list || v.list->kind == ListKind::tuple);
}

// String + string; what joins a Markup is escaped first.
Value add_strings(Runtime& rt, const Value& a, const Value& b) {
  if (!a.markup && !b.markup) return concat(rt, a, b);
  const auto safe = [](const Value& v) { return v.markup ? std::string(v.str()) : escape_html(v.str()); };
  Value v = rt.text(safe(a) + safe(b));
  v.markup = true;
  return v;
}

}  // namespace

std::string escape_html(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&#34;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

Value concat(Runtime& rt, const Value& a, const Value& b) {
  const auto as_text = [&](const Value& v) {
    return v.is(Kind::string) ? v.str() : rt.text(text_of(rt, v)).str();
  };
  const std::string_view left = as_text(a), right = as_text(b);
  if (left.size() + right.size() > kMaxTextBytes) throw Failure{"a string is too large", Error::too_large};
  rt.budget.spend(right.size() / 64);
  return make_str(rt.arena.concat(left, right));
}

Value binary(Runtime& rt, Op op, const Value& a, const Value& b) {
  if (a.is_number() && b.is_number()) return arithmetic(op, a, b);
  if (op == Op::mod && a.is(Kind::string)) {
    if (a.markup) fail_unsupported("% on a string marked as safe is not supported");
    return format_percent(rt, a.str(), b);
  }
  if (a.is(Kind::undefined)) fail_undefined(a);
  if (b.is(Kind::undefined)) fail_undefined(b);
  if (op == Op::add && a.is(Kind::string) && b.is(Kind::string)) return add_strings(rt, a, b);
  if (op == Op::add && is_plain_list(a) && is_plain_list(b) && a.list->kind == b.list->kind) {
    std::vector<Value> items(a.list->items, a.list->items + a.list->size);
    items.insert(items.end(), b.list->items, b.list->items + b.list->size);
    return rt.list(items, a.list->kind);
  }
  const auto is_sequence = [](const Value& v) { return v.is(Kind::string) || is_plain_list(v); };
  if (op == Op::mul && is_sequence(a) && b.is_integral()) return repeat(rt, a, b.as_int());
  if (op == Op::mul && is_sequence(b) && a.is_integral()) return repeat(rt, b, a.as_int());
  fail_operands(op, a, b);
}

Value negate(const Value& a) {
  if (a.is(Kind::undefined)) fail_undefined(a);
  if (a.is(Kind::real)) return make_real(-a.real);
  if (!a.is_integral()) fail(fmt::format("unsupported operand for -: {}", type_name(a)));
  return make_int(-a.as_int());
}

Value plus(const Value& a) {
  if (a.is(Kind::undefined)) fail_undefined(a);
  if (a.is(Kind::real)) return a;
  if (!a.is_integral()) fail(fmt::format("unsupported operand for +: {}", type_name(a)));
  return make_int(a.as_int());
}

bool contains(Runtime& rt, const Value& container, const Value& item) {
  if (container.is(Kind::string)) {
    if (!item.is(Kind::string)) fail(fmt::format("'in' needs a string on its left, got {}", type_name(item)));
    rt.spend_on_search(container.str(), item.str());
    return container.str().find(item.str()) != std::string_view::npos;
  }
  if (container.is(Kind::dict)) {
    if (!hashable(rt.budget, item)) fail(fmt::format("unhashable type: {}", type_name(item)));
    return find_key(rt.budget, container.dict->view(), item) != nullptr;
  }
  if (container.is(Kind::list) && container.list->kind == ListKind::iterator) {
    const List& l = *container.list;
    while (l.next < l.size)
      if (equals(rt.budget, l.items[l.next++], item)) return true;
    return false;
  }
  if (container.is(Kind::list) && container.list->kind == ListKind::keys && !hashable(rt.budget, item))
    fail(fmt::format("unhashable type: {}", type_name(item)));
  const auto items = items_of(rt, container);
  return std::any_of(items.begin(), items.end(), [&](const Value& v) { return equals(rt.budget, v, item); });
}

bool compare_with(Runtime& rt, Op op, const Value& a, const Value& b) {
  switch (op) {
    case Op::eq:
      return equals(rt.budget, a, b);
    case Op::ne:
      return !equals(rt.budget, a, b);
    case Op::lt:
      return compare(rt.budget, a, b) < 0;
    case Op::le:
      return compare(rt.budget, a, b) <= 0;
    case Op::gt:
      return compare(rt.budget, a, b) > 0;
    case Op::ge:
      return compare(rt.budget, a, b) >= 0;
    case Op::in:
      return contains(rt, b, a);
    default:
      return !contains(rt, b, a);
  }
}

}  // namespace ekv::jinja
