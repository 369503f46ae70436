//! Hashes of names in htrees.
//!
//! Three functions with signed or unsigned characters, as on the machine that made the volume. Half
//! MD4 is three rounds of eight steps of RFC 1320's functions. TEA is the cipher of Wheeler and
//! Needham, sixteen cycles, used as a compression function.

/// Initial state of half MD4 and TEA.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HashSeed([u32; 4]);

/// Initial state of RFC 1320.
const MD4_INITIAL_STATE: [u32; 4] = [0x6745_2301, 0xEFCD_AB89, 0x98BA_DCFE, 0x1032_5476];

/// Hash reserved for the end of a directory, for drivers that use hashes as positions.
const HTREE_EOF_HASH: u32 = 0xFFFF_FFFE;

impl HashSeed {
    /// Uses the volume's seed, or the default if it is all zero.
    pub fn new(words: [u32; 4]) -> Self {
        Self(if words == [0; 4] { MD4_INITIAL_STATE } else { words })
    }
}

/// Hash function, seed and signedness of characters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NameHash {
    function: HashFunction,
    unsigned: bool,
    seed: HashSeed,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum HashFunction {
    Legacy,
    HalfMd4,
    Tea,
}

impl NameHash {
    /// Returns the hash of htree `version`. 3 to 5 are 0 to 2 with unsigned characters, as
    /// `unsigned` makes 0 to 2. `None` if unknown.
    pub fn of_version(version: u8, unsigned: bool, seed: HashSeed) -> Option<Self> {
        let function = match version {
            0 | 3 => HashFunction::Legacy,
            1 | 4 => HashFunction::HalfMd4,
            2 | 5 => HashFunction::Tea,
            _ => return None,
        };
        Some(Self { function, unsigned: unsigned || version > 2, seed })
    }

    /// Returns the hash of `name`; its lowest bit is always zero.
    pub fn hash_name(&self, name: &[u8]) -> u32 {
        self.major_and_minor_hash(name).0
    }

    /// Returns the hash of `name` and the minor hash, which htrees do not store.
    pub fn major_and_minor_hash(&self, name: &[u8]) -> (u32, u32) {
        let (hash, second) = match self.function {
            HashFunction::Legacy => (self.legacy_hash(name), 0),
            HashFunction::HalfMd4 => self.half_md4_hash(name),
            HashFunction::Tea => self.tea_hash(name),
        };
        match hash & !1 {
            HTREE_EOF_HASH => (HTREE_EOF_HASH.wrapping_sub(2), second),
            hash => (hash, second),
        }
    }

    fn extend_byte(&self, byte: u8) -> u32 {
        if self.unsigned { u32::from(byte) } else { i32::from(byte.cast_signed()).cast_unsigned() }
    }

    fn legacy_hash(&self, name: &[u8]) -> u32 {
        let (mut now, mut before) = (0x12A3_FE2D_u32, 0x37AB_E8F9_u32);
        for byte in name {
            let scaled = self.extend_byte(*byte).wrapping_mul(7_152_373);
            let mut next = before.wrapping_add(now ^ scaled);
            if next >> 31 != 0 {
                next = next.wrapping_sub(0x7FFF_FFFF);
            }
            (before, now) = (now, next);
        }
        now << 1
    }

    fn half_md4_hash(&self, name: &[u8]) -> (u32, u32) {
        let mut state = self.seed.0;
        for left in chunk_remainders(name, 32) {
            compress_half_md4(&mut state, &self.pack_words::<8>(left));
        }
        let [_, hash, second, _] = state;
        (hash, second)
    }

    fn tea_hash(&self, name: &[u8]) -> (u32, u32) {
        let mut state = self.seed.0;
        for left in chunk_remainders(name, 16) {
            compress_tea(&mut state, &self.pack_words::<4>(left));
        }
        let [hash, second, ..] = state;
        (hash, second)
    }

    /// Returns the start of `left` as `N` big-endian words, padded with its length in every byte. A
    /// negative signed character borrows from the bytes above it.
    fn pack_words<const N: usize>(&self, left: &[u8]) -> [u32; N] {
        let [len, ..] = left.len().to_le_bytes();
        // Names have at most 255 bytes.
        let fill = u32::from_le_bytes([len; 4]);
        let mut words = [fill; N];
        for (word, bytes) in words.iter_mut().zip(left.chunks(4)) {
            for byte in bytes {
                *word = (*word << 8).wrapping_add(self.extend_byte(*byte));
            }
        }
        words
    }
}

/// Iterates over the remainders of `name` at the start of each chunk.
fn chunk_remainders(name: &[u8], chunk: usize) -> impl Iterator<Item = &[u8]> {
    (0..name.len()).step_by(chunk).filter_map(|at| name.get(at..))
}

/// Runs eight steps of one round of RFC 1320: `order` selects the words, `shifts` the rotations.
fn md4_round(
    state: &mut [u32; 4],
    words: &[u32; 8],
    mix: fn(u32, u32, u32) -> u32,
    constant: u32,
    order: [u8; 8],
    shifts: [u32; 4],
) {
    for (pick, shift) in order.into_iter().zip(shifts.into_iter().cycle()) {
        let [a, b, c, d] = *state;
        let word = words.get(usize::from(pick)).copied().unwrap_or(0);
        let sum = a.wrapping_add(mix(b, c, d)).wrapping_add(word).wrapping_add(constant);
        *state = [d, sum.rotate_left(shift), b, c];
    }
}

fn compress_half_md4(state: &mut [u32; 4], words: &[u32; 8]) {
    let before = *state;
    let choose = |x: u32, y: u32, z: u32| (x & y) | (!x & z);
    let majority = |x: u32, y: u32, z: u32| (x & y) | (x & z) | (y & z);
    let parity = |x: u32, y: u32, z: u32| x ^ y ^ z;
    md4_round(state, words, choose, 0, [0, 1, 2, 3, 4, 5, 6, 7], [3, 7, 11, 19]);
    md4_round(state, words, majority, 0x5A82_7999, [1, 3, 5, 7, 0, 2, 4, 6], [3, 5, 9, 13]);
    md4_round(state, words, parity, 0x6ED9_EBA1, [3, 7, 2, 6, 1, 5, 0, 4], [3, 9, 11, 15]);
    add_words(state, before);
}

fn compress_tea(state: &mut [u32; 4], key: &[u32; 4]) {
    const DELTA: u32 = 0x9E37_79B9;
    let [k0, k1, k2, k3] = *key;
    let [mut y, mut z, ..] = *state;
    let half = |x: u32, sum: u32, ka: u32, kb: u32| {
        (x << 4).wrapping_add(ka) ^ x.wrapping_add(sum) ^ (x >> 5).wrapping_add(kb)
    };
    let mut sum = 0u32;
    for _ in 0..16 {
        sum = sum.wrapping_add(DELTA);
        y = y.wrapping_add(half(z, sum, k0, k1));
        z = z.wrapping_add(half(y, sum, k2, k3));
    }
    add_words(state, [y, z, 0, 0]);
}

fn add_words(state: &mut [u32; 4], what: [u32; 4]) {
    for (word, other) in state.iter_mut().zip(what) {
        *word = word.wrapping_add(other);
    }
}
