//! What a new volume or store may be written over: one rule for all that make one.
//!
//! ```text
//!   nothing recognised             written
//!   what the maker replaces itself written where --force is given: an ext volume by a volume
//!   anything else recognised       written where --force=KIND names it
//!   something compressed           never
//! ```
//! Law: what would be lost is named, and so is what would be written, before anything is.

use std::fmt::Display;
use std::str::FromStr;

use draconis_container::signature::{DetectedContent, EXT};
use rustix::io::Errno;

use crate::error::Error;

/// Names of kinds that others use.
const ALIASES: &[(&str, &str)] = &[
    ("ext2", EXT),
    ("ext3", EXT),
    ("ext4", EXT),
    ("dos", "mbr"),
    ("vfat", "fat"),
    ("vpc", "vhd"),
    ("iso", "iso9660"),
    ("lvm2", "lvm"),
    ("raid", "md"),
    ("jbd", "journal"),
    ("gz", "gzip"),
];

/// What may be lost.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Force {
    /// Nothing.
    #[default]
    Nothing,
    /// What is usual: what the new one replaces.
    Usual,
    /// What is of this kind.
    Kind(String),
}

impl Force {
    /// For callers who know no kinds.
    pub fn usual(is_forced: bool) -> Self {
        if is_forced { Self::Usual } else { Self::Nothing }
    }

    /// Whether what is usual may be lost.
    pub fn is_usual(&self, usual: &[&str]) -> bool {
        match self {
            Self::Nothing => false,
            Self::Usual => true,
            Self::Kind(kind) => usual.contains(&kind.as_str()),
        }
    }
}

impl FromStr for Force {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let known = ALIASES.iter().find(|(alias, _)| *alias == text);
        Ok(match text {
            "" => Self::Usual,
            text => Self::Kind(known.map_or(text, |(_, kind)| kind).to_owned()),
        })
    }
}

/// A new volume or store, and where it is to be written.
pub struct Overwriting<'a> {
    /// The file, device or partition, as messages name it.
    pub place: &'a dyn Display,
    /// How much of it is there, in bytes.
    pub len_bytes: u64,
    /// What it holds.
    pub held: Option<DetectedContent>,
    /// What may be lost.
    pub force: &'a Force,
    /// Kinds that need no name.
    pub usual: &'a [&'a str],
    /// How a caller says it: `--force`, or `force` of a library.
    pub word: &'a str,
}

impl Overwriting<'_> {
    /// Refuses to write where something would be lost that may not be.
    ///
    /// # Errors
    /// What it holds, where that may not be lost.
    pub fn check(&self) -> crate::Result<()> {
        let Some(held) = self.held else { return Ok(()) };
        let Self { place, word, .. } = self;
        let DetectedContent { kind, what, .. } = held;
        let refused = |text: String| Err(Error::new(Errno::EXIST, text));
        if held.is_compressed() {
            return refused(format!(
                "{place} holds {what}, which is never overwritten: remove it first, or name \
                 another file"
            ));
        }
        let is_usual = self.usual.contains(&kind);
        if matches!(self.force, Force::Kind(named) if named == kind)
            || (is_usual && *self.force == Force::Usual)
        {
            return Ok(());
        }
        let lost = match held.has_partitions() {
            true => "it and all partitions are lost then; --partition N writes to one of them",
            false => "it is lost then with all that it holds",
        };
        let len = crate::messages::format_bytes(self.len_bytes);
        let named = if is_usual { String::new() } else { format!("={kind}") };
        refused(format!(
            "{place} holds {what}; {word}{named} overwrites it (all of {place}, {len}), and {lost}"
        ))
    }
}

#[cfg(test)]
mod tests {
    use draconis_container::signature::of;

    use super::*;

    #[test]
    fn what_is_lost_is_named_first() {
        let ext = |head: &mut [u8]| head[1080..1082].copy_from_slice(&[0x53, 0xEF]);
        let mut volume = vec![0; 4096];
        ext(&mut volume);
        let mut disk = vec![0; 4096];
        disk[512..520].copy_from_slice(b"EFI PART");
        let check = |head: &[u8], force: &str, usual: &[&str]| {
            let force = match force {
                "none" => Force::Nothing,
                text => text.parse().unwrap(),
            };
            let held = of(head);
            let place = &"a.img";
            let all =
                Overwriting { place, len_bytes: 4096, held, force: &force, usual, word: "--force" };
            all.check().map_err(|error| error.to_string())
        };
        for (head, force, is_written) in [
            (&[0; 4096][..], "none", true),
            (&volume, "none", false),
            (&volume, "", true),
            (&volume, "ext4", true),
            (&volume, "gpt", false),
            (&disk, "none", false),
            (&disk, "", false),
            (&disk, "ext", false),
            (&disk, "gpt", true),
            (&[0x28, 0xB5, 0x2F, 0xFD], "zstd", false),
            (b"DracoObj", "", false),
            (b"DracoObj", "store", true),
        ] {
            assert_eq!(check(head, force, &[EXT]).is_ok(), is_written, "{force}: {:?}", of(head));
        }
        let said = check(&disk, "", &[EXT]).unwrap_err();
        for part in ["a.img holds a partition table", "--force=gpt", "4.0 KiB", "--partition N"] {
            assert!(said.contains(part), "{said}");
        }
        assert!(check(b"DracoObj", "", &[EXT, "store"]).is_ok());
    }
}
