/* The sum of verify/lanes.py over bytes in the host's memory; that file says what it computes.

   No flag names the machine's own instructions: what is compiled is chosen among at run time, so
   that machines that share a home folder can share it. Little-endian machines only. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define BLOCK 4096
#define LANES 4
#define PIECE 1024 /* words whose keys are made together: 4 KB stay in the first cache */
#define SPARE 16   /* keys more: LANES of a vector that begins with the last word, and its rest */

typedef struct {
  uint64_t second_seed;        /* of the multipliers B */
  uint32_t low[BLOCK + 16];    /* halves of the table T, and zeros behind its 4099 numbers */
  uint32_t high[BLOCK + 16];
} Table;

static uint64_t splitmix64(uint64_t seed, uint64_t number) {
  uint64_t z = seed + (number + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

/* Bytes of a Table, whose memory is the caller's. */
size_t lanes_table_bytes(void) { return sizeof(Table); }

/* The seeds are those of T and of B, as verify.lanes.key_seeds gives them. */
void lanes_fill_table(Table *table, uint64_t first_seed, uint64_t second_seed) {
  memset(table, 0, sizeof *table);
  table->second_seed = second_seed;
  for (int j = 0; j < BLOCK + LANES - 1; ++j) {
    const uint64_t t = splitmix64(first_seed, (uint64_t)j);
    table->low[j] = (uint32_t)t;
    table->high[j] = (uint32_t)(t >> 32);
  }
}

/* keys[0..count) of a block from column on: the upper halves of T * B mod 2**64. */
static inline __attribute__((always_inline)) void make_keys(
    const Table *table, uint64_t multiplier, size_t column, size_t count, uint32_t *keys) {
  const uint32_t low = (uint32_t)multiplier, high = (uint32_t)(multiplier >> 32);
  const uint32_t *t_low = table->low + column, *t_high = table->high + column;
  for (size_t j = 0; j < count; ++j) {
    const uint32_t carried = (uint32_t)(((uint64_t)t_low[j] * low) >> 32);
    keys[j] = carried + t_low[j] * high + t_high[j] * low;
  }
}

static inline __attribute__((always_inline)) void add_plain(
    const uint32_t *keys, const uint8_t *data, size_t count, uint64_t *lanes) {
  uint64_t a = 0, b = 0, c = 0, d = 0;
  for (size_t j = 0; j < count; ++j) {
    uint32_t word;
    memcpy(&word, data + 4 * j, 4);
    a += (uint64_t)keys[j] * word;
    b += (uint64_t)keys[j + 1] * word;
    c += (uint64_t)keys[j + 2] * word;
    d += (uint64_t)keys[j + 3] * word;
  }
  lanes[0] += a;
  lanes[1] += b;
  lanes[2] += c;
  lanes[3] += d;
}

#if defined(__x86_64__)
/* make_keys, eight at a time. Writes up to 7 keys more than `count`. */
__attribute__((target("avx2"))) static inline void make_keys_avx2(
    const Table *table, uint64_t multiplier, size_t column, size_t count, uint32_t *keys) {
  const __m256i low = _mm256_set1_epi32((int)(uint32_t)multiplier);
  const __m256i high = _mm256_set1_epi32((int)(uint32_t)(multiplier >> 32));
  for (size_t j = 0; j < count; j += 8) {
    const __m256i t_low = _mm256_loadu_si256((const void *)(table->low + column + j));
    const __m256i t_high = _mm256_loadu_si256((const void *)(table->high + column + j));
    const __m256i even = _mm256_srli_epi64(_mm256_mul_epu32(t_low, low), 32);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(t_low, 32), low);
    const __m256i carried = _mm256_blend_epi32(even, odd, 0xAA);
    const __m256i crossed =
        _mm256_add_epi32(_mm256_mullo_epi32(t_low, high), _mm256_mullo_epi32(t_high, low));
    _mm256_storeu_si256((void *)(keys + j), _mm256_add_epi32(carried, crossed));
  }
}

/* sum + a * c + b * d, of the lower halves of 64-bit elements. */
__attribute__((target("avx2"), always_inline)) static inline __m256i added(
    __m256i sum, __m256i a, __m256i c, __m256i b, __m256i d) {
  const __m256i both = _mm256_add_epi64(_mm256_mul_epu32(a, c), _mm256_mul_epu32(b, d));
  return _mm256_add_epi64(sum, both);
}

/* A multiplication takes the lower halves of 64-bit elements, which are every other word: the odd
   words come by a shift, and their keys are the even ones of the next lane's window. A shift costs
   less than to read over the border of a cache line. */
__attribute__((target("avx2"))) static void add_avx2(
    const Table *table, uint64_t multiplier, size_t column, const uint8_t *data, size_t count,
    uint64_t *lanes) {
  uint32_t keys[PIECE + SPARE] __attribute__((aligned(64)));
  make_keys_avx2(table, multiplier, column, count + LANES, keys);
  const size_t whole = count / 8 * 8;
  __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
  for (size_t j = 0; j < whole; j += 8) {
    const __m256i even = _mm256_loadu_si256((const void *)(data + 4 * j));
    const __m256i odd = _mm256_srli_epi64(even, 32);
    const __m256i k0 = _mm256_load_si256((const void *)(keys + j));
    const __m256i k1 = _mm256_srli_epi64(k0, 32);
    const __m256i k2 = _mm256_loadu_si256((const void *)(keys + j + 2));
    const __m256i k3 = _mm256_srli_epi64(k2, 32);
    const __m256i k4 = _mm256_loadu_si256((const void *)(keys + j + 4));
    a = added(a, k0, even, k1, odd);
    b = added(b, k1, even, k2, odd);
    c = added(c, k2, even, k3, odd);
    d = added(d, k3, even, k4, odd);
  }
  uint64_t parts[LANES][4];
  _mm256_storeu_si256((void *)parts[0], a);
  _mm256_storeu_si256((void *)parts[1], b);
  _mm256_storeu_si256((void *)parts[2], c);
  _mm256_storeu_si256((void *)parts[3], d);
  for (int l = 0; l < LANES; ++l)
    for (int i = 0; i < 4; ++i) lanes[l] += parts[l][i];
  add_plain(keys + whole, data + 4 * whole, count - whole, lanes);
}
#endif

static void add_any(const Table *table, uint64_t multiplier, size_t column, const uint8_t *data,
                    size_t count, uint64_t *lanes) {
  uint32_t keys[PIECE + SPARE];
  make_keys(table, multiplier, column, count + LANES, keys);
  add_plain(keys, data, count, lanes);
}

typedef void (*Add)(const Table *, uint64_t, size_t, const uint8_t *, size_t, uint64_t *);

/* The fastest variant up to `wanted` that this processor runs: 0 for any, 1 for AVX2. */
int lanes_variant(int wanted) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (wanted >= 1 && __builtin_cpu_supports("avx2")) return 1;
#else
  (void)wanted;
#endif
  return 0;
}

static void add_cut_word(Add add, const Table *table, const uint8_t *data, size_t size,
                         uint64_t offset, uint64_t *lanes) {
  const uint64_t word = offset / 4;
  uint8_t filled[4] = {0, 0, 0, 0};
  memcpy(filled + offset % 4, data, size);
  add(table, splitmix64(table->second_seed, word / BLOCK) | 1, word % BLOCK, filled, 1, lanes);
}

/* Adds to lanes[4] `size` bytes that lie at byte `offset` of the whole tensor. */
void lanes_add(int variant, const Table *table, const uint8_t *data, uint64_t size,
               uint64_t offset, uint64_t *lanes) {
  Add add = add_any;
#if defined(__x86_64__)
  if (variant == 1) add = add_avx2;
#else
  (void)variant;
#endif
  const uint64_t before = (4 - offset % 4) % 4, head = before < size ? before : size;
  if (head) add_cut_word(add, table, data, head, offset, lanes);
  data += head, offset += head, size -= head;
  while (size >= 4) {
    const uint64_t word = offset / 4, column = word % BLOCK;
    const uint64_t multiplier = splitmix64(table->second_seed, word / BLOCK) | 1;
    uint64_t count = size / 4 < BLOCK - column ? size / 4 : BLOCK - column;
    if (count > PIECE) count = PIECE;
    add(table, multiplier, column, data, count, lanes);
    data += 4 * count, offset += 4 * count, size -= 4 * count;
  }
  if (size) add_cut_word(add, table, data, size, offset, lanes);
}
