//! Digests of container images: `sha256:` or `sha512:` and hexadecimal digits.

use std::io::Read;

use anyhow::{Context, bail, ensure};
use draconis_types::path_bytes::format_hex;
use sha2::{Digest as _, Sha256, Sha512};

/// Expected digest of some bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BlobDigest {
    algorithm: Algorithm,
    hex: String,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Algorithm {
    Sha256,
    Sha512,
}

impl BlobDigest {
    /// Parses a digest. The result is safe as a file name, since it has hexadecimal digits only.
    pub fn parse(text: &str) -> anyhow::Result<Self> {
        let shown = || format!("the digest {:?}", text.chars().take(200).collect::<String>());
        let (algorithm, hex) = text.split_once(':').with_context(shown)?;
        let (algorithm, len) = match algorithm {
            "sha256" => (Algorithm::Sha256, 64),
            "sha512" => (Algorithm::Sha512, 128),
            _ => bail!("{}: only sha256 and sha512 are known", shown()),
        };
        let digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        ensure!(hex.len() == len && hex.bytes().all(digit), "{} is none", shown());
        Ok(Self { algorithm, hex: hex.to_owned() })
    }

    /// Computes the digest of some bytes.
    pub fn of_bytes(bytes: &[u8]) -> Self {
        Self::from_bytes(Self::sha256(bytes))
    }

    /// Wraps a computed digest.
    pub fn from_bytes(sum: [u8; 32]) -> Self {
        Self { algorithm: Algorithm::Sha256, hex: format_hex(&sum) }
    }

    /// Computes the digest as raw bytes.
    pub fn sha256(bytes: &[u8]) -> [u8; 32] {
        Sha256::digest(bytes).into()
    }

    /// Returns the path of the blob in an OCI layout.
    pub fn blob_path(&self) -> String {
        let algorithm = match self.algorithm {
            Algorithm::Sha256 => "sha256",
            Algorithm::Sha512 => "sha512",
        };
        format!("blobs/{algorithm}/{}", self.hex)
    }

    /// Reads all of `bytes` and compares their digest.
    pub fn verify(&self, bytes: impl Read) -> anyhow::Result<()> {
        let found = match self.algorithm {
            Algorithm::Sha256 => hex_digest::<Sha256>(bytes)?,
            Algorithm::Sha512 => hex_digest::<Sha512>(bytes)?,
        };
        ensure!(found == self.hex, "its digest is {found}, and not what the image says: damaged");
        Ok(())
    }
}

impl std::fmt::Display for BlobDigest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let algorithm = match self.algorithm {
            Algorithm::Sha256 => "sha256",
            Algorithm::Sha512 => "sha512",
        };
        write!(f, "{algorithm}:{}", self.hex)
    }
}

fn hex_digest<D: sha2::Digest>(mut bytes: impl Read) -> anyhow::Result<String> {
    let mut sum = D::new();
    let mut buffer = vec![0; 256 << 10];
    loop {
        match bytes.read(&mut buffer)? {
            0 => return Ok(format_hex(&sum.finalize())),
            got => sum.update(&buffer[..got]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_and_verify_digests() {
        let of_nothing = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        let digest = BlobDigest::parse(of_nothing).unwrap();
        assert_eq!(digest, BlobDigest::of_bytes(b""));
        digest.verify(&b""[..]).unwrap();
        assert!(digest.verify(&b"x"[..]).is_err());
        assert_eq!(digest.to_string(), of_nothing);
        let long = format!("sha512:{}", format_hex(&Sha512::digest(b"x")));
        BlobDigest::parse(&long).unwrap().verify(&b"x"[..]).unwrap();
        for bad in ["", "sha256", "md5:00", "sha256:../../etc", &of_nothing[..60]] {
            assert!(BlobDigest::parse(bad).is_err(), "{bad}");
        }
        assert!(BlobDigest::parse(&of_nothing.to_uppercase()).is_err());
    }
}
