/* CRC-32C (Castagnoli), as iSCSI, ext4 and LevelDB use it; values/checksum.py computes the same without a compiler.

   Processors with an instruction for it finish one every cycle, but each takes three: three consecutive
   blocks are read side by side, and their checksums are combined with a table of the effect of BLOCK zero bytes. */
#include "lanes.h"

#define POLYNOMIAL 0x82f63b78u
#define BLOCK 4096 /* bytes of each of the three */

static uint32_t bytes[8][256]; /* of each byte, followed by 0 to 7 zero bytes */
static uint32_t block[4][256]; /* of each byte of a checksum that BLOCK zero bytes follow */

static uint32_t after_zeros(uint32_t crc, int64_t count)
{
    for (; count > 0; count--)
        crc = bytes[0][crc & 0xff] ^ crc >> 8;
    return crc;
}

__attribute__((constructor)) static void fill_tables(void)
{
    uint32_t bits[32];
    for (uint32_t n = 0; n < 256; n++) {
        uint32_t crc = n;
        for (int i = 0; i < 8; i++)
            crc = crc & 1 ? POLYNOMIAL ^ crc >> 1 : crc >> 1;
        bytes[0][n] = crc;
    }
    for (int i = 1; i < 8; i++)
        for (int n = 0; n < 256; n++)
            bytes[i][n] = bytes[0][bytes[i - 1][n] & 0xff] ^ bytes[i - 1][n] >> 8;
    for (int i = 0; i < 32; i++)
        bits[i] = after_zeros((uint32_t)1 << i, BLOCK);
    for (int at = 0; at < 4; at++)
        for (uint32_t n = 0; n < 256; n++)
            for (int i = 0; i < 8; i++)
                block[at][n] ^= n >> i & 1 ? bits[8 * at + i] : 0;
}

#if defined(__SSE4_2__)
#include <nmmintrin.h>
#define ADD_WORD(crc, word) (uint32_t)_mm_crc32_u64(crc, word)
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#define ADD_WORD(crc, word) __crc32cd(crc, word)
#else
INLINE uint32_t ADD_WORD(uint32_t crc, uint64_t word)
{
    word ^= crc;
    crc = 0;
    for (int i = 0; i < 8; i++)
        crc ^= bytes[7 - i][word >> 8 * i & 0xff];
    return crc;
}
#endif

INLINE uint64_t word_at(const char *data)
{
    uint64_t word;
    memcpy(&word, data, sizeof word);
    return word;
}

INLINE uint32_t after_block(uint32_t crc)
{
    return block[0][crc & 0xff] ^ block[1][crc >> 8 & 0xff] ^ block[2][crc >> 16 & 0xff] ^ block[3][crc >> 24];
}

/* Bypasses the cache where the processor can: the copy is next read by the disk. */
INLINE void put_word(char *to, uint64_t word)
{
#if defined(__x86_64__)
    _mm_stream_si64((long long *)to, (long long)word);
#else
    memcpy(to, &word, sizeof word);
#endif
}

INLINE uint32_t add_line(const char *data, uint32_t crc, char *to)
{
    for (int64_t i = 0; i < 64; i += 8) {
        const uint64_t word = word_at(data + i);
        if (to)
            put_word(to + i, word);
        crc = ADD_WORD(crc, word);
    }
    return crc;
}

/* The checksum of these bytes, which follow bytes with the checksum `before`. With `to`, that of a copy made there. */
INLINE uint32_t checksum(const char *data, int64_t n, uint32_t before, char *to)
{
    uint32_t crc = ~before;
    for (; n >= 3 * BLOCK; n -= 3 * BLOCK, data += 3 * BLOCK) {
        uint32_t second = 0, third = 0;
        for (int64_t i = 0; i < BLOCK; i += 64) {
            crc = add_line(data + i, crc, to ? to + i : 0);
            second = add_line(data + BLOCK + i, second, to ? to + BLOCK + i : 0);
            third = add_line(data + 2 * BLOCK + i, third, to ? to + 2 * BLOCK + i : 0);
        }
        crc = after_block(after_block(crc) ^ second) ^ third;
        to = to ? to + 3 * BLOCK : 0;
    }
    for (; n >= 8; n -= 8, data += 8) {
        const uint64_t word = word_at(data);
        if (to) {
            put_word(to, word);
            to += 8;
        }
        crc = ADD_WORD(crc, word);
    }
    for (; n > 0; n--, data++) {
        const uint8_t byte = (uint8_t)*data;
        if (to)
            *to++ = (char)byte;
        crc = bytes[0][(crc ^ byte) & 0xff] ^ crc >> 8;
    }
    return ~crc;
}

/* 0 if there are no bytes. */
uint32_t EXPORT(crc)(const char *data, int64_t n, uint32_t before)
{
    return checksum(data, n, before, 0);
}

/* Each byte is read once: the checksum is that of the copy, even if another thread writes to `data` meanwhile. */
uint32_t EXPORT(copy)(const char *data, int64_t n, uint32_t before, char *to)
{
    if (n == 0)
        return before; /* an empty tensor has no address */
    if ((uintptr_t)to % 8)
        return checksum(memcpy(to, data, (size_t)n), n, before, 0);
    const uint32_t crc = checksum(data, n, before, to);
#if defined(__x86_64__)
    _mm_sfence(); /* another thread writes the copy */
#endif
    return crc;
}
