// The table of facts and the sizes of a call, for Python: the same for every backend.
#pragma once
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "losses/facts.h"

namespace pylosses {

#define PYL_NAME(name) #name,
constexpr const char *kLossNames[] = {PYL_LOSSES(PYL_NAME)}, *kFamilyNames[] = {PYL_FAMILIES(PYL_NAME)};
#undef PYL_NAME

// name -> (number, family, labels, soft targets, names of its own numbers)
inline pybind11::dict table_of(const Facts* facts) {
  pybind11::dict table;
  for (int i = 0; i < kLosses; ++i) {
    const Facts& f = facts[i];
    std::string names;
    for (const char* part : f.own_names.parts)
      if (part) names += (names.empty() ? "" : ", ") + std::string(part);
    table[kLossNames[i]] = pybind11::make_tuple(i, kFamilyNames[static_cast<int>(f.family)], f.labels, f.soft_targets,
                                                pybind11::str(names).attr("split")(", "));
  }
  return table;
}

// Copies a loss's own numbers; as many as its formula has.
inline void take_numbers(const Facts* facts, int loss, const std::vector<double>& given, double* numbers) {
  if (loss < 0 || loss >= kLosses) throw std::invalid_argument("no such loss");
  if (given.size() != static_cast<size_t>(facts[loss].own))
    throw std::invalid_argument(std::string(kLossNames[loss]) + " has " + std::to_string(facts[loss].own) +
                                " own numbers, got " + std::to_string(given.size()));
  for (size_t i = 0; i < given.size(); ++i) numbers[i] = given[i];
}

// In the order of `Sizes` in pylosses/sizes.py.
inline pybind11::tuple told(const Sizes& s) {
  if (s.fixed < 0) throw std::invalid_argument("the drivers of this family do not do what the loss asks of them");
  constexpr const char* shapes[] = {"rows", "classes", "classes_of_images"};
  return pybind11::make_tuple(s.fixed, s.a_row, s.a_class, s.a_logit, s.area_rows, shapes[static_cast<int>(s.shape)], s.ahead,
                              s.weight_sum, s.second_divisor);
}

}  // namespace pylosses
