#include "config/model_spec.h"

namespace expertd {

std::string_view RecipeName(Recipe recipe) { return recipe == Recipe::kMxfp4 ? "mxfp4" : "nvfp4"; }

std::string_view MatrixName(Matrix matrix) {
  switch (matrix) {
    case Matrix::kGate:
      return "gate";
    case Matrix::kUp:
      return "up";
    case Matrix::kDown:
      return "down";
  }
  return "?";
}

}  // namespace expertd
