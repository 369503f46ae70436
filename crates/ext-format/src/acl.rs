//! POSIX access control lists: the form on disk, and that of Linux's `system.posix_acl_*`.
//!
//! ```text
//!   disk, version 1   | 1 | tag perm | tag perm id | ..   id only of named users and groups
//!   Linux, version 2  | 2 | tag perm id | ..              id -1 for none
//! ```
//! The list and the mode of its inode share entries; POSIX.1e, draft 17, sections 23.1.3 and
//! 23.1.4, keeps them in step:
//! ```text
//!   mode     owner        group                            other
//!   list     USER_OBJ     MASK, or GROUP_OBJ without one   OTHER
//! ```

use super::{le16, le32};
use crate::{Error, Result};

const USER_OBJ: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP_OBJ: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;
const NO_ID: u32 = u32::MAX;

/// Converts a list on disk to the form of Linux's `getxattr`.
///
/// # Errors
/// [`Error::Corrupt`] if the list has another version, an unknown tag, or a wrong length.
pub fn to_linux(disk: &[u8]) -> Result<Vec<u8>> {
    let corrupt = Error::corrupt("access control list");
    if le32(disk, 0) != Some(1) {
        return Err(corrupt);
    }
    let mut linux = 2u32.to_le_bytes().to_vec();
    let mut rest = disk.get(4..).unwrap_or_default();
    while !rest.is_empty() {
        let (Some(tag), Some(perm)) = (le16(rest, 0), le16(rest, 2)) else { return Err(corrupt) };
        let (id, len) = match tag {
            USER | GROUP => (le32(rest, 4).ok_or(corrupt.clone())?, 8),
            USER_OBJ | GROUP_OBJ | MASK | OTHER => (NO_ID, 4),
            _ => return Err(corrupt),
        };
        linux.extend(tag.to_le_bytes());
        linux.extend(perm.to_le_bytes());
        linux.extend(id.to_le_bytes());
        rest = rest.get(len..).unwrap_or_default();
    }
    Ok(linux)
}

/// Converts a list in Linux's form to the form on disk.
///
/// # Errors
/// [`Error::Misuse`] if it is no list of version 2.
pub fn to_disk(linux: &[u8]) -> Result<Vec<u8>> {
    let misuse = Error::Misuse("not an access control list");
    if le32(linux, 0) != Some(2) || linux.len() % 8 != 4 {
        return Err(misuse);
    }
    let mut disk = 1u32.to_le_bytes().to_vec();
    for entry in linux.get(4..).unwrap_or_default().chunks_exact(8) {
        let tag = le16(entry, 0).ok_or(misuse.clone())?;
        let len = match tag {
            USER | GROUP => 8,
            USER_OBJ | GROUP_OBJ | MASK | OTHER => 4,
            _ => return Err(misuse),
        };
        disk.extend(entry.get(..len).unwrap_or_default());
    }
    Ok(disk)
}

/// One entry of a list.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct AclEntry {
    tag: u16,
    /// Permission bits: read 4, write 2, execute 1.
    perm: u16,
    id: u32,
}

/// A valid list: owner, named users, owning group, named groups, mask, others, in this order. A
/// mask is required with named entries.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Acl {
    entries: Vec<AclEntry>,
}

impl Acl {
    /// Parses a list in Linux's form; `None` for an empty one, which requests removal.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a list that Linux refuses.
    pub fn from_xattr(linux: &[u8]) -> Result<Option<Self>> {
        let misuse = Error::Misuse("not an access control list");
        if le32(linux, 0) != Some(2) || linux.len() % 8 != 4 {
            return Err(misuse);
        }
        let mut lines = Vec::new();
        for line in linux.get(4..).unwrap_or_default().chunks_exact(8) {
            let (Some(tag), Some(perm), Some(id)) = (le16(line, 0), le16(line, 2), le32(line, 4))
            else {
                return Err(misuse);
            };
            let id = if matches!(tag, USER | GROUP) { id } else { NO_ID };
            lines.push(AclEntry { tag, perm, id });
        }
        match lines.is_empty() {
            true => Ok(None),
            false if is_valid(&lines) => Ok(Some(Self { entries: lines })),
            false => Err(misuse),
        }
    }

    /// Returns the list in Linux's form.
    pub fn to_xattr(&self) -> Vec<u8> {
        let mut linux = 2u32.to_le_bytes().to_vec();
        for AclEntry { tag, perm, id } in &self.entries {
            linux.extend(tag.to_le_bytes());
            linux.extend(perm.to_le_bytes());
            linux.extend(id.to_le_bytes());
        }
        linux
    }

    /// Returns the nine permission bits of an inode with this access list.
    pub fn access_mode(&self) -> u16 {
        let perm = |tag| self.perm(tag).unwrap_or(0);
        perm(USER_OBJ) << 6 | self.perm(MASK).unwrap_or(perm(GROUP_OBJ)) << 3 | perm(OTHER)
    }

    /// Returns true if the mode expresses the whole list, so that it need not be stored.
    pub fn is_equivalent_to_mode(&self) -> bool {
        self.entries.iter().all(|line| matches!(line.tag, USER_OBJ | GROUP_OBJ | OTHER))
    }

    /// Returns the access list after a change of the mode.
    #[must_use]
    pub fn chmod(&self, mode: u16) -> Self {
        let mut list = self.clone();
        let class = list.group_class_tag();
        for line in &mut list.entries {
            line.perm = match line.tag {
                USER_OBJ => mode >> 6 & 7,
                OTHER => mode & 7,
                tag if tag == class => mode >> 3 & 7,
                _ => line.perm,
            };
        }
        list
    }

    /// Returns the access list and mode that a new inode inherits from this default list. `mode`
    /// has no umask applied; the list is `None` if the mode expresses it. A directory also gets the
    /// default list, a symbolic link neither.
    pub fn inherit(&self, mode: u16) -> (Option<Self>, u16) {
        let mut list = self.clone();
        let class = list.group_class_tag();
        let mut kept = mode & !0o777;
        for line in &mut list.entries {
            let shift = match line.tag {
                USER_OBJ => 6,
                OTHER => 0,
                tag if tag == class => 3,
                _ => continue,
            };
            line.perm &= mode >> shift & 7;
            kept |= line.perm << shift;
        }
        let access = (!list.is_equivalent_to_mode()).then_some(list);
        (access, kept)
    }

    /// Returns the tag of the entry that the group bits of the mode map to.
    fn group_class_tag(&self) -> u16 {
        if self.perm(MASK).is_some() { MASK } else { GROUP_OBJ }
    }

    fn perm(&self, tag: u16) -> Option<u16> {
        self.entries.iter().find(|line| line.tag == tag).map(|line| line.perm)
    }
}

fn is_valid(lines: &[AclEntry]) -> bool {
    let count = |tag| lines.iter().filter(|line| line.tag == tag).count();
    let masks = count(MASK);
    let named = count(USER) > 0 || count(GROUP) > 0;
    let each = lines.iter().all(|line| {
        let known = matches!(line.tag, USER_OBJ | USER | GROUP_OBJ | GROUP | MASK | OTHER);
        let has_id = line.id != NO_ID;
        known && line.perm <= 7 && has_id == matches!(line.tag, USER | GROUP)
    });
    // Tag numbers ascend in the order of the entries.
    each && lines.is_sorted_by_key(|line| line.tag)
        && [USER_OBJ, GROUP_OBJ, OTHER].into_iter().all(|tag| count(tag) == 1)
        && (masks == 1 || masks == 0 && !named)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encode_linux_acl(lines: &[(u16, u16, u32)]) -> Vec<u8> {
        let lines =
            lines.iter().map(|(tag, perm, id)| AclEntry { tag: *tag, perm: *perm, id: *id });
        Acl { entries: lines.collect() }.to_xattr()
    }

    fn build_acl(lines: &[(u16, u16, u32)]) -> Acl {
        Acl::from_xattr(&encode_linux_acl(lines)).unwrap().unwrap()
    }

    const OWNER_ENTRIES: [(u16, u16, u32); 3] = [(1, 7, NO_ID), (4, 5, NO_ID), (0x20, 4, NO_ID)];
    const ENTRIES_WITH_NAMED_IDS: [(u16, u16, u32); 5] =
        [(1, 7, NO_ID), (2, 6, 1000), (4, 5, NO_ID), (0x10, 7, NO_ID), (0x20, 4, NO_ID)];

    #[test]
    fn only_valid_acls_are_accepted() {
        let good = |lines: &[(u16, u16, u32)]| Acl::from_xattr(&encode_linux_acl(lines)).is_ok();
        assert!(good(&OWNER_ENTRIES) && good(&ENTRIES_WITH_NAMED_IDS));
        assert_eq!(Acl::from_xattr(&[2, 0, 0, 0]).unwrap(), None);
        assert!(Acl::from_xattr(&[1, 0, 0, 0]).is_err() && Acl::from_xattr(&[]).is_err());
        assert!(Acl::from_xattr(&encode_linux_acl(&ENTRIES_WITH_NAMED_IDS)[..19]).is_err());
        let [user, named, group, mask, other] = ENTRIES_WITH_NAMED_IDS;
        // Each may be omitted only if no other entry needs it.
        assert!(!good(&[named, group, mask, other]) && !good(&[user, named, mask, other]));
        assert!(!good(&[user, named, group, mask]) && !good(&[user, named, group, other]));
        assert!(good(&[user, group, mask, other]));
        // Once, and in order.
        assert!(!good(&[user, user, group, other]) && !good(&[user, other, group]));
        assert!(!good(&[user, named, group, mask, mask, other]));
        assert!(!good(&[user, group, named, mask, other]));
        assert!(good(&[user, (2, 6, 5), (2, 6, 3), group, (8, 1, 3), mask, other]));
        // Known tags, permissions and ids.
        assert!(!good(&[user, group, other, (0x40, 1, NO_ID)]));
        assert!(!good(&[(1, 8, NO_ID), group, other]));
        assert!(!good(&[user, (2, 6, NO_ID), group, mask, other]));
    }

    #[test]
    fn acl_and_mode_stay_consistent() {
        assert_eq!(
            (
                build_acl(&OWNER_ENTRIES).access_mode(),
                build_acl(&OWNER_ENTRIES).is_equivalent_to_mode()
            ),
            (0o754, true)
        );
        assert_eq!(
            (
                build_acl(&ENTRIES_WITH_NAMED_IDS).access_mode(),
                build_acl(&ENTRIES_WITH_NAMED_IDS).is_equivalent_to_mode()
            ),
            (0o774, false)
        );
        for mode in 0..0o1000 {
            for lines in [&OWNER_ENTRIES[..], &ENTRIES_WITH_NAMED_IDS[..]] {
                let changed = build_acl(lines).chmod(0o4000 | mode);
                assert_eq!(changed.access_mode(), mode);
                assert_eq!(Acl::from_xattr(&changed.to_xattr()).unwrap().unwrap(), changed);
            }
        }
        // With a mask, the entry of the owning group stays.
        assert_eq!(build_acl(&ENTRIES_WITH_NAMED_IDS).chmod(0o700).perm(GROUP_OBJ), Some(5));
        assert_eq!(build_acl(&OWNER_ENTRIES).chmod(0o700).perm(GROUP_OBJ), Some(0));
    }

    #[test]
    fn inherited_acl_is_masked_by_mode() {
        assert_eq!(build_acl(&OWNER_ENTRIES).inherit(0o2666), (None, 0o2644));
        let (access, mode) = build_acl(&ENTRIES_WITH_NAMED_IDS).inherit(0o640);
        assert_eq!(mode, 0o640);
        let access = access.unwrap();
        assert_eq!(access.access_mode(), 0o640);
        assert_eq!((access.perm(USER), access.perm(GROUP_OBJ)), (Some(6), Some(5)));
        for mode in 0..0o1000 {
            let (access, kept) = build_acl(&ENTRIES_WITH_NAMED_IDS).inherit(mode);
            assert_eq!(kept, mode & 0o774);
            assert_eq!(access.unwrap().access_mode(), kept);
        }
    }

    #[test]
    fn ids_missing_on_disk_are_added() {
        let disk = [1, 0, 0, 0, 1, 0, 6, 0, 2, 0, 4, 0, 0xE8, 3, 0, 0, 0x20, 0, 4, 0];
        let linux = to_linux(&disk).unwrap();
        assert_eq!(linux.len(), 4 + 3 * 8);
        assert_eq!(to_disk(&linux).unwrap(), disk);
        assert!(to_disk(&linux[..19]).is_err());
        assert_eq!(linux[4..12], [1, 0, 6, 0, 255, 255, 255, 255]);
        assert_eq!(linux[12..20], [2, 0, 4, 0, 0xE8, 3, 0, 0]);
        assert!(to_linux(&disk[..15]).is_err());
        assert!(to_linux(&[2, 0, 0, 0]).is_err());
    }
}
