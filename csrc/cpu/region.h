// Driver for losses of classes over many rows: the batch, or each image, is an area with one set of class sums.
// Forward reads the logits once; the gradient needs the sums of a whole area, so backward reads them again.
// Rows are walked by RegionTiles or RegionRows, which have the same members:
// - piece_rows(classes): rows of a piece of work, cut by the problem alone, so that any number of threads gives the same bits;
// - sums(begin, end, into, partial): adds the class sums of rows of one area; with `partial` it saves what backward needs of
//   every row and adds the row losses of the softmax formula beside;
// - find_mass(begin, end, found): marks classes that a row gives more than nothing;
// - gradient(begin, end, k).
#pragma once
#include "cpu/pixelwise_region.h"
#include "cpu/rowwise_region.h"

namespace PYL_ISA {

// What the classes of a call need to know.
template <class T>
struct Region {
  const Context<T>& c;
  RegionView view;
  int64_t areas, area_rows;
  bool mean;
  const T* weight;    // of the classes
  double* counted;    // saved: how many areas the mean counts,
  double* saved = 0;  // and push and pull of every area and class, unless areas are small

  explicit Region(const Context<T>& c) : c(c) {
    view = region_view(c.p.loss, c.p.numbers);
    areas = view.by_image ? c.p.images : 1;
    area_rows = areas ? c.p.rows / areas : 0;
    mean = c.p.reduction == Reduction::mean;
    weight = c.facts.beside ? nullptr : c.weight;  // of the softmax formula beside
    counted = c.stats ? c.after_rows() : nullptr;
    if (counted && !small()) saved = counted + 1;
  }
  bool small() const { return areas > 1 && area_rows < kLargeArea; }
  RegionResult formula(const RegionClass& one) const {
    return visit_region<RegionResult>(c.p.loss, [&](auto f) { return f.of_class(own_of<decltype(f)>(c.p.numbers), one); });
  }

  // A class without a target whose probabilities float32 rounds to 0 may still have a mass.
  bool unsure(const ClassSums& sums, int64_t j) const {
    return view.smooth == 0 && view.absent != Absent::zero && !sums.of(j).present() && !sums.of(j).mass;
  }
  bool unsure(const ClassSums& sums) const {
    bool found = false;
    for (int64_t j = 0; j < c.p.classes; ++j) found |= unsure(sums, j);
    return found;
  }

  // Losses of an area's classes to `out` (reduction none) or to `total`, coefficients to `k`.
  void finish(const ClassSums& sums, const uint8_t* found, T* out, double* k, Partial& total) const {
    bool some = false;
    double sum = 0, lost = 0, mass = 0;  // lost: low digits of the sum over many classes
    for (int64_t j = 0; j < c.p.classes; ++j) some |= sums.of(j).present();
    for (int64_t j = 0; j < c.p.classes; ++j) {
      RegionClass one = sums.of(j);
      one.mass |= found && found[j];
      RegionResult r = formula(one);
      if (!some || (view.absent == Absent::zero && !one.present())) r = {0, 0, 0};
      double w = weight && c.p.reduction != Reduction::none ? weight[j] : 1;
      if (c.p.reduction == Reduction::none) {
        if (out) out[j] = static_cast<T>(r.loss);
      } else if (view.absent == Absent::exclude ? !one.present() : !some) {
        w = 0;
      }
      if (w == 0) r = {0, 0, 0};
      double term = w * r.loss, next = sum + term;
      lost += sum > term ? (sum - next) + term : (term - next) + sum;
      sum = next, mass += w;
      if (k) k[2 * j] = w * r.push, k[2 * j + 1] = w * r.pull;
    }
    if (c.p.reduction == Reduction::none) return;
    sum += lost;
    bool counts = mass != 0;
    double share = !mean ? 1 : counts ? 1 / mass : 0;
    for (int64_t i = 0; k && i < 2 * c.p.classes; ++i) k[i] *= share;
    if (!mean) total.sum += sum;
    else if (counts) total.sum += sum / mass, total.mass += 1;
  }
  void finish(const Partial& total, const Partial& rows) const {
    if (counted) *counted = total.mass;
    if (c.p.reduction == Reduction::none) return;
    double loss = c.parts.main * (mean && total.mass > 0 ? total.sum / total.mass : total.sum), side = c.reduced(rows);
    *c.out = static_cast<T>(c.beside() ? loss + c.parts.side * side : loss);
  }
  // What the coefficients of an area are multiplied with, besides an upstream gradient for each class.
  double factor() const {
    if (c.p.reduction == Reduction::none) return 1;
    return *static_cast<const T*>(c.p.grad_out) * c.parts.main / (mean && *counted > 0 ? *counted : 1);
  }
};

// One thread's means: its walker of rows, and what belongs to one area.
template <class E, class T>
struct RegionTools {
  E rows;
  Scratch<double> memory, coefficients;
  Scratch<uint8_t> found;
  ClassSums sums;
  ClassFactors<T> k;
  int64_t area = -1;

  explicit RegionTools(const Context<T>& c)
      : rows(c),
        memory(ClassSums::size(c.p.classes)),
        coefficients(2 * c.p.classes),
        found(c.p.classes),
        sums(memory.data, c.p.classes),
        k(c.p.classes) {}

  // Makes `k` the factors of an area, from its push and pull.
  void set_factors(const Region<T>& g, int64_t its_area, const double* push_pull) {
    const Context<T>& c = g.c;
    const T* up = c.p.reduction == Reduction::none ? static_cast<const T*>(c.p.grad_out) + its_area * c.p.classes : nullptr;
    area = its_area;
    k.set(push_pull, g.factor(), up);
  }
};

// How work is cut: small areas several a piece, large ones into several pieces.
template <class E, class T>
int64_t areas_a_piece(const Region<T>& g) {
  return E::piece_rows(g.c.p.classes) / (g.area_rows ? g.area_rows : 1);
}
template <class E, class T>
int64_t pieces_an_area(const Region<T>& g) {
  int64_t rows = E::piece_rows(g.c.p.classes);
  return (g.area_rows + rows - 1) / rows;
}

// Calls body(tools, area, piece, partial) on every area, when areas are small.
template <class E, class T, class F>
void over_small_areas(const Region<T>& g, Partial* total, F body) {
  const Problem& p = g.c.p;
  int64_t each = areas_a_piece<E>(g);
  auto make = [&] { return RegionTools<E, T>(g.c); };
  for_pieces((g.areas + each - 1) / each, threads_for(p, p.classes), total, make,
             [&](RegionTools<E, T>& tools, int64_t piece, Partial& partial) {
               int64_t end = (piece + 1) * each < g.areas ? (piece + 1) * each : g.areas;
               for (int64_t area = piece * each; area < end; ++area) body(tools, area, piece, partial);
             });
}
// Calls body(tools, area, piece, first row, last row, partial) on every piece of every area.
template <class E, class T, class F>
void over_large_areas(const Region<T>& g, Partial* total, F body) {
  const Problem& p = g.c.p;
  int64_t rows = E::piece_rows(p.classes), each = pieces_an_area<E>(g);
  auto make = [&] { return RegionTools<E, T>(g.c); };
  for_pieces(g.areas * each, threads_for(p, p.classes), total, make,
             [&](RegionTools<E, T>& tools, int64_t piece, Partial& partial) {
               int64_t area = piece / each, begin = area * g.area_rows + piece % each * rows, end = (area + 1) * g.area_rows;
               body(tools, area, piece, begin, begin + rows < end ? begin + rows : end, partial);
             });
}

template <class E, class T>
void small_areas_forward(const Region<T>& g, Partial& total, Partial& rows) {
  const Context<T>& c = g.c;
  int64_t each = areas_a_piece<E>(g), pieces = (g.areas + each - 1) / each;
  Scratch<Partial> totals(pieces);
  for (int64_t i = 0; i < pieces; ++i) totals.data[i] = Partial();
  over_small_areas<E>(g, &rows, [&](RegionTools<E, T>& tools, int64_t area, int64_t piece, Partial& partial) {
    int64_t begin = area * g.area_rows, end = begin + g.area_rows;
    tools.sums.clear();
    tools.rows.sums(begin, end, tools.sums, &partial);
    bool unsure = g.unsure(tools.sums);
    for (int64_t j = 0; unsure && j < c.p.classes; ++j) tools.found.data[j] = 0;
    if (unsure) tools.rows.find_mass(begin, end, tools.found.data);
    T* out = c.p.reduction == Reduction::none ? c.out + area * c.p.classes : nullptr;
    g.finish(tools.sums, unsure ? tools.found.data : nullptr, out, nullptr, totals.data[piece]);
  });
  for (int64_t i = 0; i < pieces; ++i) total.add(totals.data[i]);
}

template <class E, class T>
void large_areas_forward(const Region<T>& g, Partial& total, Partial& rows) {
  const Context<T>& c = g.c;
  int64_t classes = c.p.classes, each = pieces_an_area<E>(g), size = ClassSums::size(classes);
  Scratch<double> memory(g.areas * (each ? each : 1) * size);
  auto sums_of = [&](int64_t piece) { return ClassSums(memory.data + piece * size, classes); };
  over_large_areas<E>(g, &rows, [&](auto& tools, int64_t, int64_t piece, int64_t begin, int64_t end, Partial& partial) {
    ClassSums sums = sums_of(piece);
    sums.clear();
    tools.rows.sums(begin, end, sums, &partial);
  });
  bool unsure = false;
  for (int64_t area = 0; area < g.areas; ++area) {
    ClassSums sums = sums_of(area * each);
    for (int64_t piece = 1; piece < each; ++piece) sums.add(sums_of(area * each + piece));
    unsure |= g.unsure(sums);
  }
  Scratch<uint8_t> found(unsure ? g.areas * classes : 1);
  if (unsure) {
    for (int64_t i = 0; i < g.areas * classes; ++i) found.data[i] = 0;
    over_large_areas<E>(g, nullptr, [&](auto& tools, int64_t area, int64_t, int64_t begin, int64_t end, Partial&) {
      if (g.unsure(sums_of(area * each))) tools.rows.find_mass(begin, end, found.data + area * classes);
    });
  }
  for (int64_t area = 0; area < g.areas; ++area) {
    T* out = c.p.reduction == Reduction::none ? c.out + area * classes : nullptr;
    double* k = g.saved ? g.saved + area * 2 * classes : nullptr;
    g.finish(sums_of(area * each), unsure ? found.data + area * classes : nullptr, out, k, total);
  }
}

template <class E, class T>
void areas_forward(const Context<T>& c) {
  Region<T> g(c);
  Partial total, rows;
  if (c.p.rows == 0) {
    for (int64_t i = 0; c.p.reduction == Reduction::none && i < g.areas * c.p.classes; ++i) c.out[i] = 0;
  } else if (g.small()) {
    small_areas_forward<E>(g, total, rows);
  } else {
    large_areas_forward<E>(g, total, rows);
  }
  g.finish(total, rows);
}

template <class E, class T>
void areas_backward(Context<T>& c) {
  Region<T> g(c);
  if (c.beside()) c.set_base(*static_cast<const T*>(c.p.grad_out) * c.parts.side, c.divisors[0], c.divisors[1]);
  if (!g.small()) {
    over_large_areas<E>(g, nullptr, [&](auto& tools, int64_t area, int64_t, int64_t begin, int64_t end, Partial&) {
      if (tools.area != area) tools.set_factors(g, area, g.saved + area * 2 * c.p.classes);
      tools.rows.gradient(begin, end, tools.k);
    });
    return;
  }
  over_small_areas<E>(g, nullptr, [&](RegionTools<E, T>& tools, int64_t area, int64_t, Partial& unused) {
    int64_t begin = area * g.area_rows, end = begin + g.area_rows;
    tools.sums.clear();
    tools.rows.sums(begin, end, tools.sums, nullptr);
    g.finish(tools.sums, nullptr, nullptr, tools.coefficients.data, unused);
    tools.set_factors(g, area, tools.coefficients.data);
    tools.rows.gradient(begin, end, tools.k);
  });
}

template <class T>
void region_forward(const Context<T>& c, Partial&) {
  areas_forward<RegionRows<T>>(c);
}
template <class T>
void pixels_region_forward(const Context<T>& c, Partial&) {
  areas_forward<RegionTiles<T>>(c);
}
template <class T>
void region_backward(Context<T>& c) {
  areas_backward<RegionRows<T>>(c);
}
template <class T>
void pixels_region_backward(Context<T>& c) {
  areas_backward<RegionTiles<T>>(c);
}

}  // namespace PYL_ISA
