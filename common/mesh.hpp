// Ranks in a line or in a grid: which ranks form which group.
#pragma once

#include <string>
#include <vector>

#include "common/communicator.hpp"

namespace mgp {

/// A 2D grid of ranks, rows x columns, row-major: rank = row * columns + column. Neighbours in a row are adjacent ranks
/// (tensor parallel inside a node); a column holds one rank of each row (data parallel across).
struct Mesh2D {
  int rows = 1;
  int columns = 1;
  int row_of(int rank) const { return rank / columns; }
  int column_of(int rank) const { return rank % columns; }
  std::vector<int> row_ranks(int row) const;
  std::vector<int> column_ranks(int column) const;
  /// The grid as text, for the banner.
  std::string picture(const std::string& row_name, const std::string& column_name) const;
};

/// A mesh of `world` ranks with `columns` per row. Throws UsageError with both numbers and the sizes that would do if
/// they do not divide; `flag` is the option to change.
Mesh2D make_mesh(int world, int columns, const std::string& flag);

/// The communicators of this rank on a mesh.
struct MeshGroups {
  Communicator row;     ///< the ranks of my row, named `row_name`
  Communicator column;  ///< the ranks of my column, named `column_name`
};
MeshGroups split_mesh(Communicator& world, const Mesh2D& mesh, const std::string& row_name,
                      const std::string& column_name);

}  // namespace mgp
