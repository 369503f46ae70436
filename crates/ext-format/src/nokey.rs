//! No-key names: encoding of encrypted names without their key.
//!
//! ```text
//!   name on disk   | ciphertext: 1 to 255 bytes                                        |
//!   no-key name    base64url( hash of the name (4) | second hash (4) | ciphertext      )
//!                  base64url( .. | first 149 bytes | SHA-256 of the rest (32)          )
//! ```
//! (`Documentation/filesystems/fscrypt.rst`.) The encoding is deterministic, so that a no-key name
//! can be looked up.

use sha2::{Digest, Sha256};

use super::le16;
use crate::{Error, Result};

/// Ciphertext bytes encoded directly; the rest is hashed.
const MAX_UNHASHED_BYTES: usize = 149;
const HASHES_BYTES: usize = 8;
const DIGEST_BYTES: usize = 32;
const MAX_NO_KEY_BYTES: usize = HASHES_BYTES + MAX_UNHASHED_BYTES + DIGEST_BYTES;

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/// Encodes `ciphertext`, in a directory that hashes it to `hashes`.
pub fn no_key_name(hashes: (u32, u32), ciphertext: &[u8]) -> Vec<u8> {
    let (plain, rest) = ciphertext.split_at(ciphertext.len().min(MAX_UNHASHED_BYTES));
    let mut bytes = Vec::with_capacity(MAX_NO_KEY_BYTES);
    bytes.extend(hashes.0.to_le_bytes());
    bytes.extend(hashes.1.to_le_bytes());
    bytes.extend(plain);
    if !rest.is_empty() {
        bytes.extend(Sha256::digest(rest).iter());
    }
    encode(&bytes)
}

/// Returns the length of [`no_key_name`] for `ciphertext_bytes`.
pub fn no_key_name_bytes(ciphertext_bytes: u64) -> u64 {
    let plain = ciphertext_bytes.min(MAX_UNHASHED_BYTES as u64);
    let digest = if plain < ciphertext_bytes { DIGEST_BYTES as u64 } else { 0 };
    let all = plain.saturating_add(digest).saturating_add(HASHES_BYTES as u64);
    all.saturating_mul(4).div_ceil(3)
}

/// Bytes of the length before the ciphertext of a symbolic link's target.
const TARGET_HEAD_BYTES: usize = 2;

/// Encodes the target of a symbolic link with these contents.
///
/// # Errors
/// [`Error::Corrupt`] if the target is empty or longer than the contents.
pub fn no_key_target(contents: &[u8]) -> Result<Vec<u8>> {
    let len = le16(contents, 0).map_or(0, usize::from);
    let ciphertext = contents.get(TARGET_HEAD_BYTES..).and_then(|rest| rest.get(..len));
    match ciphertext.filter(|it| !it.is_empty()) {
        Some(ciphertext) => Ok(no_key_name((0, 0), ciphertext)),
        None => Err(Error::corrupt("symbolic link: length of its encrypted target")),
    }
}

/// Returns the length of [`no_key_target`] for a link of `size_bytes`.
pub fn no_key_target_bytes(size_bytes: u64) -> u64 {
    no_key_name_bytes(size_bytes.saturating_sub(TARGET_HEAD_BYTES as u64))
}

/// A parsed no-key name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NoKeyName {
    plain: Vec<u8>,
    digest: Option<[u8; DIGEST_BYTES]>,
}

impl NoKeyName {
    /// Parses a name; `None` if it is no valid encoding.
    pub fn parse(name: &[u8]) -> Option<Self> {
        let bytes = decode(name)?;
        let rest = bytes.get(HASHES_BYTES..).filter(|rest| !rest.is_empty())?;
        let (plain, digest) = rest.split_at(rest.len().min(MAX_UNHASHED_BYTES));
        let digest = match digest {
            [] => None,
            digest => Some(digest.try_into().ok()?),
        };
        Some(Self { plain: plain.to_vec(), digest })
    }

    /// Returns true if the name encodes `ciphertext`.
    pub fn matches(&self, ciphertext: &[u8]) -> bool {
        let Some(rest) = ciphertext.strip_prefix(&self.plain[..]) else { return false };
        match self.digest {
            None => rest.is_empty(),
            Some(digest) => !rest.is_empty() && Sha256::digest(rest).as_slice() == digest,
        }
    }
}

/// Encodes unpadded base64url.
fn encode(bytes: &[u8]) -> Vec<u8> {
    let mut text = Vec::with_capacity(bytes.len().saturating_mul(4).div_ceil(3));
    for three in bytes.chunks(3) {
        let mut word = [0; 4];
        for (to, from) in word.iter_mut().skip(1).zip(three) {
            *to = *from;
        }
        let word = u32::from_be_bytes(word);
        let digits = [18, 12, 6, 0].map(|shift| (word >> shift) & 63);
        let digits = digits.iter().take(three.len().saturating_add(1));
        text.extend(
            digits
                .filter_map(|digit| ALPHABET.get(crate::units::saturating_usize((*digit).into()))),
        );
    }
    text
}

/// Decodes [`encode`]; `None` for invalid text.
fn decode(text: &[u8]) -> Option<Vec<u8>> {
    if text.len() > MAX_NO_KEY_BYTES.saturating_mul(4).div_ceil(3) {
        return None;
    }
    let mut bytes = Vec::with_capacity(MAX_NO_KEY_BYTES);
    for four in text.chunks(4) {
        let mut word = 0u32;
        for nth in 0..4 {
            let digit = match four.get(nth) {
                Some(byte) => ALPHABET.iter().position(|digit| digit == byte)?,
                None => 0,
            };
            word = word << 6 | u32::try_from(digit).ok()?;
        }
        let [_, three @ ..] = word.to_be_bytes();
        let (there, beyond) = three.split_at(four.len().saturating_sub(1));
        // One digit is no byte, and spare bits must be zero.
        if there.is_empty() || beyond.iter().any(|byte| *byte != 0) {
            return None;
        }
        bytes.extend(there);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_key_names_match_their_ciphertext() {
        for len in [1usize, 2, 3, 16, 148, 149, 150, 255] {
            let ciphertext: Vec<u8> = (0..len).map(|nth| (nth * 89) as u8).collect();
            let name = no_key_name((0x1234_5678, 9), &ciphertext);
            assert!(name.len() <= 255 && name.len() as u64 == no_key_name_bytes(len as u64));
            let read = NoKeyName::parse(&name).unwrap();
            assert!(read.matches(&ciphertext), "{len}");
            let mut other = ciphertext.clone();
            other[len - 1] ^= 1;
            assert!(!read.matches(&other) && !read.matches(&ciphertext[..len - 1]));
            other.push(0);
            assert!(!read.matches(&other));
        }
    }

    #[test]
    fn no_key_target_has_predicted_length() {
        for len in [1u16, 16, 58, 149, 150, 1000] {
            let contents = [&len.to_le_bytes()[..], &vec![b'c'; usize::from(len)]].concat();
            let shown = no_key_target(&contents).unwrap();
            assert_eq!(shown.len() as u64, no_key_target_bytes(contents.len() as u64));
            assert!(no_key_target(&contents[..contents.len() - 1]).is_err());
        }
        assert!(no_key_target(&[]).is_err() && no_key_target(&[0, 0, 1]).is_err());
    }

    #[test]
    fn random_bytes_do_not_panic() {
        let mut random = draconis_device::Random::new(3);
        for _ in 0..20_000 {
            let len = random.next_below(300) as usize;
            let digits: Vec<u8> =
                (0..len).map(|_| ALPHABET[random.next_below(64) as usize]).collect();
            let bytes: Vec<u8> = (0..len).map(|_| random.next_u64() as u8).collect();
            for name in [digits, bytes] {
                let read = NoKeyName::parse(&name);
                assert!(read.is_none_or(|read| !read.matches(&[]) && !read.matches(b"another")));
                let _ = no_key_target(&name);
            }
        }
    }

    #[test]
    fn invalid_no_key_names_are_refused() {
        assert_eq!(encode(b"\xfb\xff"), b"-_8");
        for wrong in
            [&b""[..], b"A", b"-_9", b"AAAA+AAA", b"AAAAAAAAAAA", b"AAAAAAAAAAA=", &[b'A'; 253]]
        {
            assert_eq!(NoKeyName::parse(wrong), None, "{}", wrong.escape_ascii());
        }
        // A length between direct encoding and one with a digest.
        assert_eq!(NoKeyName::parse(&encode(&[1; 170])), None);
        assert!(NoKeyName::parse(&encode(&[1; 9])).is_some());
    }
}
