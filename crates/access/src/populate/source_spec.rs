//! Values of `--from`: a directory, an archive, or a container image.
//!
//! ```text
//!   DIR   FILE   -                   a directory, a tar archive, one on standard input
//!   oci:DIR[:TAG]                    an image in a directory, as umoci and skopeo lay it out
//!   oci-archive:FILE[:TAG]           the same in a tar archive
//!   docker-archive:FILE[:TAG]        what docker save writes
//! ```
//! A file whose name begins like that can be given as `./oci:...`.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use draconis_types::path_bytes::ShowPath;

use super::blob::Blob;
use super::image::{self, ImageKind, ImageOptions, SourceArchives};
use super::layers::ImageLayer;

/// Source of files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceSpec {
    /// An archive on standard input.
    Stdin,
    /// A directory or an archive.
    Path(PathBuf),
    /// A container image.
    Image {
        /// Storage of the image.
        kind: ImageKind,
        /// Path, and the tag if there is one.
        name: OsString,
    },
}

impl From<OsString> for SourceSpec {
    fn from(text: OsString) -> Self {
        if text == "-" {
            return Self::Stdin;
        }
        for (prefix, kind) in ImageKind::ALL {
            if let Some(name) = text.as_bytes().strip_prefix(prefix.as_bytes()) {
                return Self::Image { kind, name: OsStr::from_bytes(name).to_owned() };
            }
        }
        Self::Path(text.into())
    }
}

impl std::fmt::Display for SourceSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Stdin => write!(f, "standard input"),
            Self::Path(path) => write!(f, "{}", path.shown()),
            Self::Image { kind, name } => {
                let prefix = ImageKind::ALL.iter().find(|(_, other)| other == kind);
                write!(f, "{}{}", prefix.map_or("", |(prefix, _)| prefix), name.shown())
            }
        }
    }
}

impl SourceSpec {
    /// Returns true for a directory of this machine.
    pub fn is_directory(&self) -> bool {
        matches!(self, Self::Path(path) if path.is_dir())
    }

    /// Returns the host path; `None` for standard input.
    pub fn path(&self) -> Option<PathBuf> {
        match self {
            Self::Stdin => None,
            Self::Path(path) => Some(path.clone()),
            Self::Image { name, .. } => {
                Some(split_tag(name).map_or_else(|_| name.into(), |it| it.0))
            }
        }
    }

    /// Opens the archives and verifies their digests.
    pub(super) fn open_archives(
        &self,
        choice: &ImageOptions<'_>,
    ) -> anyhow::Result<SourceArchives> {
        let shown = self.to_string();
        self.open(choice).with_context(|| shown)
    }

    fn open(&self, choice: &ImageOptions<'_>) -> anyhow::Result<SourceArchives> {
        let archive = match self {
            Self::Image { kind, name } => {
                let (path, tag) = split_tag(name)?;
                return image::open(*kind, &path, tag.as_deref(), choice);
            }
            Self::Stdin => {
                let input = std::os::fd::AsFd::as_fd(&std::io::stdin()).try_clone_to_owned()?;
                Blob::new(input.into(), choice.temp_dir_of)?
            }
            Self::Path(path) => {
                ensure!(
                    !path.is_dir(),
                    "a directory is taken alone; tar makes an archive of it, which can be laid \
                     over others"
                );
                Blob::new(File::open(path)?, choice.temp_dir_of)?
            }
        };
        let layer = ImageLayer { archive, display_name: self.to_string(), whiteouts: false };
        Ok(SourceArchives { layers: vec![layer], config: None })
    }
}

/// Splits `PATH:TAG`, both of which may contain colons: the shortest existing path
/// wins.
fn split_tag(name: &OsStr) -> anyhow::Result<(PathBuf, Option<String>)> {
    if Path::new(name).exists() {
        return Ok((name.into(), None));
    }
    let bytes = name.as_bytes();
    let colons = bytes.iter().enumerate().filter(|(_, byte)| **byte == b':').map(|(at, _)| at);
    for colon in colons {
        let path = Path::new(OsStr::from_bytes(&bytes[..colon]));
        if path.exists() {
            let tag = std::str::from_utf8(&bytes[colon + 1..]).context("the tag is not UTF-8")?;
            return Ok((path.into(), Some(tag).filter(|tag| !tag.is_empty()).map(str::to_owned)));
        }
    }
    // Opening the path will report the error.
    Ok((name.into(), None))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefix_selects_source_kind() {
        let origin = |text: &str| SourceSpec::from(OsString::from(text));
        assert_eq!(origin("-"), SourceSpec::Stdin);
        assert_eq!(origin("./oci:x"), SourceSpec::Path("./oci:x".into()));
        assert_eq!(origin("tree"), SourceSpec::Path("tree".into()));
        for text in ["oci:a:b", "oci-archive:x", "docker-archive:x:y/z:1"] {
            assert!(matches!(origin(text), SourceSpec::Image { .. }));
            assert_eq!(origin(text).to_string(), text);
        }
    }

    #[test]
    fn tag_follows_existing_path() {
        let dir = tempfile::tempdir().unwrap();
        let colon = dir.path().join("a:b");
        std::fs::write(&colon, b"").unwrap();
        let name = |tail: &str| OsString::from(format!("{}{tail}", colon.display()));
        assert_eq!(split_tag(&name("")).unwrap(), (colon.clone(), None));
        assert_eq!(split_tag(&name(":")).unwrap(), (colon.clone(), None));
        let tag = Some("docker.io/x:1".to_owned());
        assert_eq!(split_tag(&name(":docker.io/x:1")).unwrap(), (colon.clone(), tag));
        assert_eq!(split_tag(OsStr::new("/nothing:x")).unwrap().1, None);
    }
}
