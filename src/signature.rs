//! What an image holds, by the signatures that file systems and others leave at its start.

use std::fs::File;
use std::os::unix::fs::FileExt;

/// Bytes that the signatures are in.
pub const HEAD_BYTES: usize = 68 << 10;

/// The answer for a disk with partitions; a boot sector looks the same.
pub const PARTITIONS: &str = "a partition table or boot sector";

/// Where each signature is. The first that is there counts: a file system's own comes before
/// those that may be left beside it.
const SIGNATURES: &[(usize, &[u8], &str)] = &[
    (1080, &[0x53, 0xEF], "an ext file system"),
    (0, b"DracoObj", "a store"),
    (0, b"XFSB", "an XFS file system"),
    (65600, b"_BHRfS_M", "a Btrfs file system"),
    (4086, b"SWAPSPACE2", "swap space"),
    (3, b"NTFS    ", "an NTFS file system"),
    (3, b"EXFAT   ", "an exFAT file system"),
    (54, b"FAT", "a FAT file system"),
    (82, b"FAT32", "a FAT file system"),
    (0, b"hsqs", "a SquashFS file system"),
    (1024, &[0xE2, 0xE1, 0xF5, 0xE0], "an EROFS file system"),
    (1024, &[0x10, 0x20, 0xF5, 0xF2], "an F2FS file system"),
    (32769, b"CD001", "an ISO 9660 file system"),
    (0, b"LUKS\xBA\xBE", "an encrypted volume (LUKS)"),
    (536, b"LVM2 001", "an LVM physical volume"),
    (0, b"QFI\xFB", "a QCOW2 disk image"),
    (512, b"EFI PART", PARTITIONS),
    (510, &[0x55, 0xAA], PARTITIONS),
];

/// What the first bytes of an image say that it holds.
pub fn of(head: &[u8]) -> Option<&'static str> {
    let is = |at: usize, bytes: &[u8]| head.get(at..at + bytes.len()) == Some(bytes);
    let found = SIGNATURES.iter().find(|(at, bytes, _)| is(*at, bytes));
    found.map(|(_, _, what)| *what)
}

/// What a file or device holds, as far as that is easily known.
pub fn held(file: &File) -> anyhow::Result<Option<&'static str>> {
    let mut head = vec![0; HEAD_BYTES];
    let mut len = 0;
    while len < head.len() {
        match file.read_at(&mut head[len..], len as u64)? {
            0 => break,
            got => len += got,
        }
    }
    Ok(of(&head[..len]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_is_named() {
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[0; HEAD_BYTES]), None);
        assert_eq!(of(b"XFSB"), Some("an XFS file system"));
        let mut disk = vec![0; 1 << 10];
        disk[510..512].copy_from_slice(&[0x55, 0xAA]);
        assert_eq!(of(&disk), Some(PARTITIONS));
        disk.resize(2 << 10, 0);
        disk[1080..1082].copy_from_slice(&[0x53, 0xEF]);
        assert_eq!(of(&disk), Some("an ext file system"));
    }
}
