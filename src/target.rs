//! `IMAGE[:/path]`, as people write it.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

pub use draconis_access::names::join;

/// An image and a path in its volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The file or block device.
    pub image: PathBuf,
    /// The path in the volume, as bytes; `/` if none was given.
    pub path: Vec<u8>,
}

impl Target {
    /// Splits at the first `:/`, so that an image may have colons in its name and a path too.
    fn parse(text: &OsStr) -> Self {
        let bytes = text.as_bytes();
        let (image, path) = match bytes.windows(2).position(|pair| pair == b":/") {
            Some(colon) => (&bytes[..colon], &bytes[colon + 1..]),
            // `IMAGE:` is the root, too, as with scp.
            None => (bytes.strip_suffix(b":").unwrap_or(bytes), &b"/"[..]),
        };
        Self { image: OsString::from_vec(image.to_vec()).into(), path: path.to_vec() }
    }

    /// The directory of the last name, as it is written.
    pub fn parent(&self) -> String {
        let text = self.to_string();
        let text = text.trim_end_matches('/');
        text.rfind('/').map_or(text, |cut| &text[..=cut]).to_string()
    }

    /// The last name of the path; empty for the root directory.
    pub fn file_name(&self) -> &[u8] {
        let mut names = self.path.split(|&b| b == b'/').filter(|name| !name.is_empty());
        names.next_back().unwrap_or_default()
    }
}

impl From<OsString> for Target {
    fn from(text: OsString) -> Self {
        Self::parse(&text)
    }
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.image.display(), String::from_utf8_lossy(&self.path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_and_paths() {
        for (text, image, path, name) in [
            ("disk.img", "disk.img", "/", ""),
            ("disk.img:", "disk.img", "/", ""),
            ("disk.img:/", "disk.img", "/", ""),
            ("a:b/c.img:/etc/x:/y/", "a:b/c.img", "/etc/x:/y/", "y"),
            ("/dev/sda1:/home", "/dev/sda1", "/home", "home"),
        ] {
            let target = Target::from(OsString::from(text));
            assert_eq!(target.image, PathBuf::from(image));
            assert_eq!(target.path, path.as_bytes());
            assert_eq!(target.file_name(), name.as_bytes());
        }
        let parent = |text: &str| Target::from(OsString::from(text)).parent();
        assert_eq!(
            (parent("a.img:/x/y/"), parent("a.img:/x")),
            ("a.img:/x/".into(), "a.img:/".into())
        );
    }
}
