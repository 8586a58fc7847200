"""Hold the C++ source that repeats recorded steps: matmuls of few elements, and calls.

The matmul keeps a tile of the result in registers: `ROWS` rows of `COLUMNS` vectors, of which
each element of a column of `a` and each vector of a row of `b` is read once. If
the rows of `b` are not contiguous, they are first packed into a panel that stays in the cache. If
`a` has few rows, packing `b` would take longer than the sums. Then the transposed product packs
the rows of `a`. If these would not fill a vector, registers hold a tile of dot products.

Source: K. Goto and R. van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008),
sections 4.2 and 4.4.
"""

MOST_POINTERS = 48  # arguments of a kernel

SOURCE = (
    f"#define MOST_POINTERS {MOST_POINTERS}\n"
    + r"""
#include <cstdint>
#include <cstring>
#include <exception>
#include <time.h>
#include <utility>

#if defined(__AVX512F__)
constexpr int WIDTH = 16, ROWS = 8, COLUMNS = 3;
#elif defined(__AVX__)
constexpr int WIDTH = 8, ROWS = 6, COLUMNS = 2;
#elif defined(__aarch64__)
constexpr int WIDTH = 4, ROWS = 8, COLUMNS = 2;
#else
constexpr int WIDTH = 4, ROWS = 4, COLUMNS = 2;
#endif
constexpr int PANEL = COLUMNS * WIDTH, DEPTH = 256;
constexpr int TRANSPOSED = 256;
constexpr int DOT_ROWS = 4, DOT_COLUMNS = WIDTH / 4;

typedef float Vector __attribute__((vector_size(WIDTH * sizeof(float))));
typedef float Loose __attribute__((vector_size(WIDTH * sizeof(float)), aligned(4), may_alias));
typedef int32_t Lanes __attribute__((vector_size(WIDTH * sizeof(float))));

static inline Vector load(const float* from) { return *reinterpret_cast<const Loose*>(from); }
static inline void store(float* to, Vector value) { *reinterpret_cast<Loose*>(to) = value; }

template <int HALF, int... I>
static inline Vector interleaved(Vector a, Vector b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (HALF * WIDTH / 2 + I / 2 + (I % 2) * WIDTH)...);
}

// Each round interleaves vectors half the way apart, which turns their numbers by a bit.
static inline void transpose(Vector (&rows)[WIDTH]) {
  using All = std::make_integer_sequence<int, WIDTH>;
#pragma GCC unroll 4
  for (int round = 1; round < WIDTH; round *= 2) {
    Vector next[WIDTH];
#pragma GCC unroll 16
    for (int i = 0; i < WIDTH / 2; ++i) {
      next[2 * i] = interleaved<0>(rows[i], rows[i + WIDTH / 2], All());
      next[2 * i + 1] = interleaved<1>(rows[i], rows[i + WIDTH / 2], All());
    }
#pragma GCC unroll 16
    for (int i = 0; i < WIDTH; ++i) rows[i] = next[i];
  }
}

struct Matrix {
  const float* data;
  int64_t row, column;  // strides
  const float* at(int64_t i, int64_t j) const { return data + i * row + j * column; }
};

// `width` columns of `depth` rows of b, with zeros up to `panel_row`, whole vectors.
static void pack(Matrix b, int64_t depth, int64_t width, float* panel, int64_t panel_row) {
  int64_t k = 0;
  if (b.row == 1 && b.column != 1) {
    for (; k + WIDTH <= depth; k += WIDTH) {
      for (int64_t n = 0; n < panel_row; n += WIDTH) {
        Vector rows[WIDTH];
        const int64_t known = width - n;
        if (known >= WIDTH) {
#pragma GCC unroll 16
          for (int i = 0; i < WIDTH; ++i) rows[i] = load(b.at(k, n + i));
        } else {
          for (int i = 0; i < WIDTH; ++i) rows[i] = i < known ? load(b.at(k, n + i)) : Vector{};
        }
        transpose(rows);
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; ++i) store(panel + (k + i) * panel_row + n, rows[i]);
      }
    }
  }
  for (; k < depth; ++k)
    for (int64_t n = 0; n < panel_row; ++n)
      panel[k * panel_row + n] = n < width ? *b.at(k, n) : 0.0f;
}

struct Target {
  float* data;
  int64_t row;
  bool adds;    // to what is there
  Matrix bias;  // without data: none

  Target from(int64_t i, int64_t j, bool again) const {
    return {data + i * row + j, row, again,
            {again || !bias.data ? nullptr : bias.at(i, j), bias.row, bias.column}};
  }
};

template <int C>
static inline void put(Target c, int64_t i, const Vector (&sums)[C], int64_t columns) {
  float* to = c.data + i * c.row;
  if (columns >= C * WIDTH && (!c.bias.data || c.bias.column < 2)) {
#pragma GCC unroll 4
    for (int v = 0; v < C; ++v) {
      Vector sum = sums[v];
      if (c.adds) sum += load(to + v * WIDTH);
      else if (c.bias.data && c.bias.column == 0) sum += *c.bias.at(i, 0);
      else if (c.bias.data) sum += load(c.bias.at(i, v * WIDTH));
      store(to + v * WIDTH, sum);
    }
    return;
  }
  float lanes[C * WIDTH];
  for (int v = 0; v < C; ++v) store(lanes + v * WIDTH, sums[v]);
  for (int64_t n = 0; n < columns; ++n)
    to[n] = lanes[n] + (c.adds ? to[n] : c.bias.data ? *c.bias.at(i, n) : 0.0f);
}

template <int R, int C>
static void tile(Matrix a, const float* b, int64_t b_row, int64_t depth, Target c,
                 int64_t columns) {
  Vector sums[R][C] = {};
  const float* left = a.data;
#pragma GCC unroll 2
  for (int64_t k = 0; k < depth; ++k, left += a.column, b += b_row) {
    Vector right[C];
#pragma GCC unroll 4
    for (int v = 0; v < C; ++v) right[v] = load(b + v * WIDTH);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const float factor = left[r * a.row];
#pragma GCC unroll 4
      for (int v = 0; v < C; ++v) sums[r][v] += factor * right[v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) put<C>(c, r, sums[r], columns);
}

using Tile = void (*)(Matrix, const float*, int64_t, int64_t, Target, int64_t);

template <int C, int... R>
static Tile tile_of(int64_t rows, std::integer_sequence<int, R...>) {
  static constexpr Tile tiles[] = {tile<R + 1, C>...};
  return tiles[rows - 1];
}

static void multiply_panels(Matrix a, Matrix b, Target c, int64_t m, int64_t n, int64_t depth) {
  using Rows = std::make_integer_sequence<int, ROWS>;
  using MoreRows = std::make_integer_sequence<int, 2 * ROWS>;
  alignas(64) float panel[DEPTH * PANEL];
  for (int64_t k = 0; k < depth; k += DEPTH) {
    const int64_t deep = depth - k < DEPTH ? depth - k : DEPTH;
    for (int64_t j = 0; j < n; j += PANEL) {
      const int64_t width = n - j < PANEL ? n - j : PANEL;
      const int64_t vectors = (width + WIDTH - 1) / WIDTH;
      const float* right = b.at(k, j);
      int64_t right_row = b.row;
      if (b.column != 1 || width != vectors * WIDTH) {
        right_row = vectors * WIDTH;
        pack({right, b.row, b.column}, deep, width, panel, right_row);
        right = panel;
      }
      const int64_t most = vectors == 1 ? 2 * ROWS : ROWS;
      for (int64_t i = 0; i < m; i += most) {
        const int64_t rows = m - i < most ? m - i : most;
        const Tile run = vectors == 1         ? tile_of<1>(rows, MoreRows())
                         : vectors == COLUMNS ? tile_of<COLUMNS>(rows, Rows())
                                              : tile_of<COLUMNS - 1>(rows, Rows());
        run({a.at(i, k), a.row, a.column}, right, right_row, deep, c.from(i, j, k > 0), width);
      }
    }
  }
}

// Rows of a times columns of b, both of which lie closely in memory.
template <int R, int C>
static void dots(Matrix a, Matrix b, int64_t depth, float (&result)[R][C]) {
  Vector sums[R][C] = {};
  int64_t k = 0;
  for (; k + WIDTH <= depth; k += WIDTH) {
    Vector right[C];
#pragma GCC unroll 4
    for (int j = 0; j < C; ++j) right[j] = load(b.at(k, j));
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i) {
      const Vector left = load(a.at(i, k));
#pragma GCC unroll 4
      for (int j = 0; j < C; ++j) sums[i][j] += left * right[j];
    }
  }
  if constexpr (R * C == WIDTH) {
    Vector rows[WIDTH];
#pragma GCC unroll 16
    for (int i = 0; i < WIDTH; ++i) rows[i] = sums[i / C][i % C];
    transpose(rows);
#pragma GCC unroll 4
    for (int half = WIDTH / 2; half; half /= 2)
#pragma GCC unroll 8
      for (int i = 0; i < half; ++i) rows[i] += rows[i + half];
    store(&result[0][0], rows[0]);
  } else {
    for (int i = 0; i < R; ++i)
      for (int j = 0; j < C; ++j) {
        float lanes[WIDTH];
        store(lanes, sums[i][j]);
        for (int half = WIDTH / 2; half; half /= 2)
          for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
        result[i][j] = lanes[0];
      }
  }
  for (; k < depth; ++k)
    for (int i = 0; i < R; ++i)
      for (int j = 0; j < C; ++j) result[i][j] += *a.at(i, k) * *b.at(k, j);
}

template <int R, int C>
static void dot_tile(Matrix a, Matrix b, Target c, int64_t i, int64_t j, int64_t depth) {
  float result[R][C];
  dots<R, C>({a.at(i, 0), a.row, a.column}, {b.at(0, j), b.row, b.column}, depth, result);
  const Target to = c.from(i, j, c.adds);
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < C; ++v) {
      float& sum = to.data[r * to.row + v];
      sum = result[r][v] + (to.adds ? sum : to.bias.data ? *to.bias.at(r, v) : 0.0f);
    }
}

template <int C>
static void dot_columns(Matrix a, Matrix b, Target c, int64_t j, int64_t m, int64_t depth) {
  int64_t i = 0;
  for (; i + DOT_ROWS <= m; i += DOT_ROWS) dot_tile<DOT_ROWS, C>(a, b, c, i, j, depth);
  for (; i < m; ++i) dot_tile<1, C>(a, b, c, i, j, depth);
}

// The rows of a that are summed at once stay in the cache.
static void multiply_dots(Matrix a, Matrix b, Target c, int64_t m, int64_t n, int64_t depth) {
  const int64_t parts = (depth + 2 * DEPTH - 1) / (2 * DEPTH);
  const int64_t part = ((depth + parts - 1) / parts + WIDTH - 1) / WIDTH * WIDTH;
  for (int64_t k = 0; k < depth; k += part) {
    const int64_t deep = depth - k < part ? depth - k : part;
    const Matrix left = {a.at(0, k), a.row, a.column}, right = {b.at(k, 0), b.row, b.column};
    c.adds = k > 0;
    int64_t j = 0;
    for (; j + DOT_COLUMNS <= n; j += DOT_COLUMNS)
      dot_columns<DOT_COLUMNS>(left, right, c, j, m, deep);
    for (; j < n; ++j) dot_columns<1>(left, right, c, j, m, deep);
  }
}

// The transposed matmul: then the few rows of a are what is packed.
static void multiply_transposed(Matrix a, Matrix b, Target c, int64_t m, int64_t n, int64_t depth) {
  float block[TRANSPOSED * PANEL];
  for (int64_t j = 0; j < n; j += TRANSPOSED) {
    const int64_t width = n - j < TRANSPOSED ? n - j : TRANSPOSED;
    multiply_panels({b.at(0, j), b.column, b.row}, {a.data, a.column, a.row},
                    {block, PANEL, false, {nullptr, 0, 0}}, width, m, depth);
    for (int64_t i = 0; i < m; ++i) {
      const Target to = c.from(i, j, false);
      for (int64_t k = 0; k < width; ++k)
        to.data[k] = block[k * PANEL + i] + (to.bias.data ? *to.bias.at(0, k) : 0.0f);
    }
  }
}

extern "C" void ipu_matmul(const float* a, int64_t a_row, int64_t a_column, const float* b,
                           int64_t b_row, int64_t b_column, float* c, int64_t c_row,
                           const float* bias, int64_t bias_row, int64_t bias_column, int64_t m,
                           int64_t n, int64_t depth) {
  const bool across = b_row == 1 && b_column != 1;
  const bool few = across && depth > 4 * m && 2 * m > WIDTH && m <= PANEL;
  const bool deep = across && a_column == 1 && depth > 10 * m;
  const auto multiply = few ? multiply_transposed : deep ? multiply_dots : multiply_panels;
  multiply({a, a_row, a_column}, {b, b_row, b_column},
           {c, c_row, false, {bias, bias_row, bias_column}}, m, n, depth);
}

template <int... I>
static void call(void* function, char* const* arguments, std::integer_sequence<int, I...>) {
  reinterpret_cast<void (*)(decltype(static_cast<void>(I), static_cast<void*>(nullptr))...)>(
      function)(static_cast<void*>(arguments[I])...);
}

template <int N>
static void call_with(void* function, char* const* arguments) {
  call(function, arguments, std::make_integer_sequence<int, N>());
}

constexpr int MOST = MOST_POINTERS;
template <int... N>
static void call_any(void* f, char* const* arguments, int64_t n, std::integer_sequence<int, N...>) {
  static constexpr void (*calls[])(void*, char* const*) = {call_with<N>...};
  calls[n](f, arguments);
}

// Runs steps of a recorded function until `end`, at most for about so many nanoseconds. If one
// fails, its number is done[1], and no step counts as complete: states may be overwritten in part.
// For each complete step, `ends` has the seconds since these steps began.
extern "C" int64_t ipu_replay(const int64_t* calls, int64_t count, const int64_t* operands,
                              char** memory, int64_t states, char** spare, int64_t moving,
                              char* const* moved, int64_t* done, double* ends, int64_t end,
                              int64_t nanoseconds, char* message, int64_t room) {
  timespec begun, now;
  clock_gettime(CLOCK_MONOTONIC, &begun);
  try {
    while (*done < end) {
      for (int64_t i = 0; i < moving; ++i) memory[2 * states + i] = moved[*done * moving + i];
      for (int64_t i = 0; i < count; ++i) {
        const int64_t* it = calls + 4 * i;  // kind, address, number of pointers, first operand
        const int64_t* operand = operands + it[3];
        char* pointers[MOST];
        for (int64_t p = 0; p < it[2]; ++p, operand += 2)
          pointers[p] = operand[0] < 0 ? nullptr : memory[operand[0]] + operand[1];
        if (it[0] == 0) {
          call_any(reinterpret_cast<void*>(it[1]), pointers, it[2],
                   std::make_integer_sequence<int, MOST + 1>());
        } else {
          auto as_floats = [&](int p) { return reinterpret_cast<float*>(pointers[p]); };
          ipu_matmul(as_floats(0), operand[0], operand[1], as_floats(1), operand[2], operand[3],
                     as_floats(2), operand[4], as_floats(3), operand[5], operand[6], operand[7],
                     operand[8], operand[9]);
        }
      }
      for (int64_t i = 0; i < states; ++i) {
        char* old = memory[i];
        memory[i] = memory[states + i];
        memory[states + i] = spare[i] ? spare[i] : old;
        spare[i] = nullptr;
      }
      ++*done;
      clock_gettime(CLOCK_MONOTONIC, &now);
      const int64_t seconds = now.tv_sec - begun.tv_sec;
      const int64_t passed = seconds * 1000000000 + (now.tv_nsec - begun.tv_nsec);
      ends[*done - 1] = passed * 1e-9;
      if (passed > nanoseconds) break;
    }
    return 0;
  } catch (std::exception const& error) {
    std::strncpy(message, error.what(), room - 1);
  } catch (...) {
    std::strncpy(message, "unhandled error", room - 1);
  }
  done[1] = done[0];
  done[0] = 0;
  return 1;
}
"""
)
