#include "common/mesh.hpp"

#include <gtest/gtest.h>

#include "common/error.hpp"

namespace {

using mgp::make_mesh;
using mgp::Mesh2D;

TEST(Mesh, RowsHoldNeighbours) {
  const Mesh2D mesh = make_mesh(6, 2, "--tp");
  EXPECT_EQ(mesh.rows, 3);
  EXPECT_EQ(mesh.columns, 2);
  EXPECT_EQ(mesh.row_ranks(1), (std::vector<int>{2, 3}));
  EXPECT_EQ(mesh.column_ranks(1), (std::vector<int>{1, 3, 5}));
  EXPECT_EQ(mesh.row_of(5), 2);
  EXPECT_EQ(mesh.column_of(5), 1);
}

TEST(Mesh, EveryRankIsInOneRowAndOneColumn) {
  for (int world = 1; world <= 12; ++world) {
    for (int columns = 1; columns <= world; ++columns) {
      if (world % columns != 0) continue;
      const Mesh2D mesh = make_mesh(world, columns, "--tp");
      for (int rank = 0; rank < world; ++rank) {
        EXPECT_EQ(mesh.row_ranks(mesh.row_of(rank))[static_cast<size_t>(mesh.column_of(rank))], rank);
        EXPECT_EQ(mesh.column_ranks(mesh.column_of(rank))[static_cast<size_t>(mesh.row_of(rank))], rank);
      }
    }
  }
}

TEST(Mesh, RefusesWhatDoesNotDivideAndNamesBothNumbers) {
  try {
    make_mesh(6, 4, "--tp");
    FAIL() << "6 ranks in rows of 4 were accepted";
  } catch (const mgp::UsageError& error) {
    EXPECT_STREQ(error.what(), "--tp 4: 6 ranks cannot be cut into rows of 4; --tp can be 1, 2, 3, 6");
  }
  EXPECT_THROW(make_mesh(3, 2, "--tp"), mgp::UsageError);
  EXPECT_THROW(make_mesh(2, 4, "--tp"), mgp::UsageError);
  EXPECT_THROW(make_mesh(2, 0, "--tp"), mgp::UsageError);
}

TEST(Mesh, PictureShowsTheGrid) {
  EXPECT_EQ(make_mesh(6, 3, "--tp").picture("tp", "dp"),
            "ranks, 2 x 3: a line is one tp group, a column one dp group\n"
            "    0  1  2\n"
            "    3  4  5\n");
}

}  // namespace
