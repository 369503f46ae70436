//! Overwrite protection: one rule for every command that creates a volume or store.
//!
//! ```text
//!   nothing recognised             written
//!   what the maker replaces itself written where --force is given: an ext volume by a volume
//!   anything else recognised       written where --force=KIND names it
//!   something compressed           never
//! ```
//! Law: the contents that would be lost and the new contents are named before anything is written.

use std::fmt::Display;
use std::str::FromStr;

use draconis_container::signature::{DetectedContent, EXT_KIND, RAID_CONTENT};
use rustix::io::Errno;

use crate::error::Error;

/// Alternative names of signatures, as other tools use them.
const SIGNATURE_ALIASES: &[(&str, &str)] = &[
    ("ext2", EXT_KIND),
    ("ext3", EXT_KIND),
    ("ext4", EXT_KIND),
    ("dos", "mbr"),
    ("vfat", "fat"),
    ("vpc", "vhd"),
    ("iso", "iso9660"),
    ("lvm2", "lvm"),
    ("raid", "md"),
    ("raid-member", "md"),
    ("jbd", "journal"),
    ("gz", "gzip"),
];

/// Contents that may be overwritten.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum OverwritePermission {
    /// Nothing.
    #[default]
    Nothing,
    /// Contents of the usual kinds: those that the new volume or store replaces.
    Usual,
    /// Contents of this kind.
    Kind(String),
}

impl OverwritePermission {
    /// Converts the plain flag of a caller that knows no kinds.
    pub fn from_force_flag(is_forced: bool) -> Self {
        if is_forced { Self::Usual } else { Self::Nothing }
    }

    /// Returns true if a member of a RAID may be written.
    pub fn allows_raid_member(&self) -> bool {
        matches!(self, Self::Kind(kind) if kind == RAID_CONTENT.kind)
    }

    /// Returns true if contents of the usual kinds may be overwritten.
    pub fn allows_usual(&self, usual: &[&str]) -> bool {
        match self {
            Self::Nothing => false,
            Self::Usual => true,
            Self::Kind(kind) => usual.contains(&kind.as_str()),
        }
    }
}

impl FromStr for OverwritePermission {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let known = SIGNATURE_ALIASES.iter().find(|(alias, _)| *alias == text);
        Ok(match text {
            "" => Self::Usual,
            text => Self::Kind(known.map_or(text, |(_, kind)| kind).to_owned()),
        })
    }
}

/// A new volume or store and the target that it overwrites.
pub struct OverwriteCheck<'a> {
    /// File, device or partition, as messages name it.
    pub place: &'a dyn Display,
    /// Length of the target, in bytes.
    pub len_bytes: u64,
    /// Detected contents.
    pub contents: Option<DetectedContent>,
    /// Contents that may be overwritten.
    pub force: &'a OverwritePermission,
    /// Kinds that plain `--force` covers.
    pub usual: &'a [&'a str],
    /// Name of the option: `--force`, or `force` of a library.
    pub option_name: &'a str,
}

impl OverwriteCheck<'_> {
    /// Refuses to overwrite contents that `force` does not allow.
    ///
    /// # Errors
    /// The target holds such contents.
    pub fn check(&self) -> crate::Result<()> {
        let Some(held) = self.contents else { return Ok(()) };
        let Self { place, option_name, .. } = self;
        let DetectedContent { kind, what, .. } = held;
        let refused = |text: String| Err(Error::new(Errno::EXIST, text));
        if held.is_compressed() {
            return refused(format!(
                "{place} holds {what}, which is never overwritten: remove it first, or name \
                 another file"
            ));
        }
        let is_usual = self.usual.contains(&kind);
        if matches!(self.force, OverwritePermission::Kind(named) if named == kind)
            || (is_usual && *self.force == OverwritePermission::Usual)
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
            "{place} holds {what}; {option_name}{named} overwrites it (all of {place}, {len}), and {lost}"
        ))
    }
}

#[cfg(test)]
mod tests {
    use draconis_container::signature::detect_head;

    use super::*;

    #[test]
    fn lost_contents_are_named_first() {
        let ext = |head: &mut [u8]| head[1080..1082].copy_from_slice(&[0x53, 0xEF]);
        let mut volume = vec![0; 4096];
        ext(&mut volume);
        let mut disk = vec![0; 4096];
        disk[512..520].copy_from_slice(b"EFI PART");
        let check = |head: &[u8], force: &str, usual: &[&str]| {
            let force = match force {
                "none" => OverwritePermission::Nothing,
                text => text.parse().unwrap(),
            };
            let held = detect_head(head);
            let place = &"a.img";
            let all = OverwriteCheck {
                place,
                len_bytes: 4096,
                contents: held,
                force: &force,
                usual,
                option_name: "--force",
            };
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
            assert_eq!(
                check(head, force, &[EXT_KIND]).is_ok(),
                is_written,
                "{force}: {:?}",
                detect_head(head)
            );
        }
        let errors = check(&disk, "", &[EXT_KIND]).unwrap_err();
        for part in ["a.img holds a partition table", "--force=gpt", "4.0 KiB", "--partition N"] {
            assert!(errors.contains(part), "{errors}");
        }
        assert!(check(b"DracoObj", "", &[EXT_KIND, "store"]).is_ok());
    }
}
