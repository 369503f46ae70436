//! Digests of container images: `sha256:` or `sha512:` and hexadecimal digits.

use std::io::Read;

use anyhow::{Context, bail, ensure};
use sha2::{Digest as _, Sha256, Sha512};

/// Expected digest of some bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Digest {
    algorithm: Algorithm,
    hex: String,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Algorithm {
    Sha256,
    Sha512,
}

impl Digest {
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
    pub fn of(bytes: &[u8]) -> Self {
        Self::from_bytes(Self::bytes(bytes))
    }

    /// Wraps a computed digest.
    pub fn from_bytes(sum: [u8; 32]) -> Self {
        Self { algorithm: Algorithm::Sha256, hex: hex(&sum) }
    }

    /// Computes the digest as raw bytes.
    pub fn bytes(bytes: &[u8]) -> [u8; 32] {
        Sha256::digest(bytes).into()
    }

    /// Returns the path of the blob in an OCI layout.
    pub fn path(&self) -> String {
        let algorithm = match self.algorithm {
            Algorithm::Sha256 => "sha256",
            Algorithm::Sha512 => "sha512",
        };
        format!("blobs/{algorithm}/{}", self.hex)
    }

    /// Reads all of `bytes` and compares their digest.
    pub fn compare(&self, bytes: impl Read) -> anyhow::Result<()> {
        let found = match self.algorithm {
            Algorithm::Sha256 => sum::<Sha256>(bytes)?,
            Algorithm::Sha512 => sum::<Sha512>(bytes)?,
        };
        ensure!(found == self.hex, "its digest is {found}, and not what the image says: damaged");
        Ok(())
    }
}

impl std::fmt::Display for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let algorithm = match self.algorithm {
            Algorithm::Sha256 => "sha256",
            Algorithm::Sha512 => "sha512",
        };
        write!(f, "{algorithm}:{}", self.hex)
    }
}

fn sum<D: sha2::Digest>(mut bytes: impl Read) -> anyhow::Result<String> {
    let mut sum = D::new();
    let mut buffer = vec![0; 256 << 10];
    loop {
        match bytes.read(&mut buffer)? {
            0 => return Ok(hex(&sum.finalize())),
            got => sum.update(&buffer[..got]),
        }
    }
}

/// Formats bytes as hexadecimal digits.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_read_and_compared() {
        let of_nothing = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        let digest = Digest::parse(of_nothing).unwrap();
        assert_eq!(digest, Digest::of(b""));
        digest.compare(&b""[..]).unwrap();
        assert!(digest.compare(&b"x"[..]).is_err());
        assert_eq!(digest.to_string(), of_nothing);
        let long = format!("sha512:{}", hex(&Sha512::digest(b"x")));
        Digest::parse(&long).unwrap().compare(&b"x"[..]).unwrap();
        for bad in ["", "sha256", "md5:00", "sha256:../../etc", &of_nothing[..60]] {
            assert!(Digest::parse(bad).is_err(), "{bad}");
        }
        assert!(Digest::parse(&of_nothing.to_uppercase()).is_err());
    }
}
