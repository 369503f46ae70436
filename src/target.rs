//! Targets on the command line: `IMAGE[:/path]`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use draconis_types::path_bytes::{ShowPath, escape_non_utf8};

pub use draconis_access::listing::join_path;

/// Schemes of bucket URLs.
const BUCKET_URL_SCHEMES: &[&str] = &["s3", "gs", "az", "file"];

/// An image and a path in its volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImagePath {
    /// Image: file, block device or STORE#NAME.
    pub image: PathBuf,
    /// Path in the volume, as bytes; `/` if none was given.
    pub path: Vec<u8>,
}

impl ImagePath {
    /// Splits at the first `:/`, so that image names and paths may contain colons. In a bucket URL,
    /// skips the `://` of the scheme.
    fn parse(text: &OsStr) -> Self {
        let bytes = text.as_bytes();
        let is_of = |scheme: &&&str| {
            bytes.strip_prefix(scheme.as_bytes()).is_some_and(|rest| rest.starts_with(b"://"))
        };
        let skip = BUCKET_URL_SCHEMES.iter().find(is_of).map_or(0, |scheme| scheme.len() + 1);
        let rest = bytes.get(skip..).unwrap_or_default();
        let (image, path) = match rest.windows(2).position(|pair| pair == b":/") {
            Some(colon) => bytes.split_at(skip + colon),
            // `IMAGE:` means the root directory, as with scp.
            None => (bytes.strip_suffix(b":").unwrap_or(bytes), &b":/"[..]),
        };
        let path = path.get(1..).unwrap_or_default();
        Self { image: OsString::from_vec(image.to_vec()).into(), path: path.to_vec() }
    }

    /// Returns the directory of the last name, as it was written.
    pub fn parent(&self) -> String {
        let text = self.to_string();
        let text = text.trim_end_matches('/');
        text.rfind('/').map_or(text, |cut| &text[..=cut]).to_string()
    }

    /// Returns the last name of the path; empty for the root directory.
    pub fn file_name(&self) -> &[u8] {
        let mut names = self.path.split(|&b| b == b'/').filter(|name| !name.is_empty());
        names.next_back().unwrap_or_default()
    }
}

impl From<OsString> for ImagePath {
    fn from(text: OsString) -> Self {
        Self::parse(&text)
    }
}

impl std::fmt::Display for ImagePath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.image.shown(), escape_non_utf8(&self.path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_split_into_image_and_path() {
        for (text, image, path, name) in [
            ("disk.img", "disk.img", "/", ""),
            ("disk.img:", "disk.img", "/", ""),
            ("disk.img:/", "disk.img", "/", ""),
            ("a:b/c.img:/etc/x:/y/", "a:b/c.img", "/etc/x:/y/", "y"),
            ("/dev/sda1:/home", "/dev/sda1", "/home", "home"),
            ("s3://b/p#v", "s3://b/p#v", "/", ""),
            ("s3://b/p#v:", "s3://b/p#v", "/", ""),
            ("s3://b/p#v@s:/x/y:/z", "s3://b/p#v@s", "/x/y:/z", "z"),
            ("file:///dir/b#v:/x", "file:///dir/b#v", "/x", "x"),
            ("s3:/x", "s3", "/x", "x"),
            ("other://x", "other", "//x", "x"),
        ] {
            let target = ImagePath::from(OsString::from(text));
            assert_eq!(target.image, PathBuf::from(image));
            assert_eq!(target.path, path.as_bytes());
            assert_eq!(target.file_name(), name.as_bytes());
        }
        let parent = |text: &str| ImagePath::from(OsString::from(text)).parent();
        assert_eq!(
            (parent("a.img:/x/y/"), parent("a.img:/x")),
            ("a.img:/x/".into(), "a.img:/".into())
        );
    }
}
