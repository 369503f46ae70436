//! What an image holds, by the signatures that file systems and others leave at its start.

use draconis_device::{Disk, Extent};
use draconis_exchange::heap::Block;

/// Bytes that the signatures are in.
pub const HEAD_BYTES: usize = 68 << 10;

/// What holds something that is no ext volume, and what would help.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Held {
    /// What it is, with its article.
    pub what: &'static str,
    /// What can be done with it.
    pub help: &'static str,
}

const NEW: &str = "draconis format --force makes an ext volume in its place";
const MOUNT: &str = "mount(8) mounts it";
const CPIO: &str = "bsdtar -cf TAR @FILE makes a tar archive of it";
const RAW: &str = "qemu-img convert -O raw makes one that is read";

/// The answer for a disk with partitions; a boot sector looks the same.
pub const PARTITIONS: &str = "a partition table or boot sector";

/// Where each signature is. The first that is there counts: a file system's own comes before
/// those that may be left beside it.
const SIGNATURES: &[(usize, &[u8], &str, &str)] = &[
    (1080, &[0x53, 0xEF], "an ext file system", "draconis info shows it"),
    (0, b"DracoObj", "a store", "draconis store reads it"),
    (0, b"XFSB", "an XFS file system", MOUNT),
    (65600, b"_BHRfS_M", "a Btrfs file system", MOUNT),
    (4086, b"SWAPSPACE2", "swap space", NEW),
    (65526, b"SWAPSPACE2", "swap space", NEW),
    (3, b"NTFS    ", "an NTFS file system", "mount -t ntfs3 mounts it"),
    (3, b"EXFAT   ", "an exFAT file system", MOUNT),
    (54, b"FAT", "a FAT file system", MOUNT),
    (82, b"FAT32", "a FAT file system", MOUNT),
    (0, b"hsqs", "a SquashFS file system", "unsquashfs unpacks it"),
    (1024, &[0xE2, 0xE1, 0xF5, 0xE0], "an EROFS file system", "fsck.erofs --extract unpacks it"),
    (1024, &[0x10, 0x20, 0xF5, 0xF2], "an F2FS file system", MOUNT),
    (32769, b"CD001", "an ISO 9660 file system", "mount -o loop mounts it, bsdtar -x unpacks it"),
    (
        0,
        b"LUKS\xBA\xBE",
        "an encrypted volume (LUKS)",
        "cryptsetup open shows what is in it as a device",
    ),
    (536, b"LVM2 001", "an LVM physical volume", "vgchange -ay shows what is in it as devices"),
    (3, b"-FVE-FS-", "an encrypted volume (BitLocker)", "dislocker shows what is in it"),
    (1024, b"H+\0\x04", "an HFS+ file system", MOUNT),
    (32, b"NXSB", "an APFS container", "apfs-fuse mounts it"),
    (65588, b"ReIsEr", "a ReiserFS file system", "a Linux before 6.13 mounts it"),
    (32768, b"JFS1", "a JFS file system", MOUNT),
    (0, &[0x45, 0x3D, 0xCD, 0x28], "a cramfs file system", MOUNT),
    (0, b"-rom1fs-", "a romfs file system", MOUNT),
    (0, b"UBI#", "an image for raw flash (UBI)", "ubireader unpacks it"),
    (0, b"QFI\xFB", "a QCOW2 disk image", NEW),
    (0, b"vhdxfile", "a VHDX disk image", NEW),
    (0, b"conectix", "a VHD disk image", NEW),
    (0, b"KDMV", "a VMDK disk image", NEW),
    (
        0,
        b"# Disk DescriptorFile",
        "a description of a VMDK disk image",
        "it names the files that hold the disk",
    ),
    (0, &[0x3A, 0xFF, 0x26, 0xED], "an Android sparse image", NEW),
    (64, &[0x7F, 0x10, 0xDA, 0xBE], "a VDI disk image", RAW),
    (0, b"QED\0", "a QED disk image", RAW),
    (0, b"WithoutFreeSpace", "a Parallels disk image", RAW),
    (0, b"WithouFreSpacExt", "a Parallels disk image", RAW),
    (0, b"MSWIM\0\0\0", "a Windows image (WIM)", "wimlib-imagex unpacks it"),
    (257, b"ustar", "a tar archive", "draconis format --from makes a volume of it"),
    (0, &[0x1F, 0x8B, 8], "something compressed with gzip", "gzip -d unpacks it"),
    (0, &[0x28, 0xB5, 0x2F, 0xFD], "something compressed with zstd", "zstd -d unpacks it"),
    (0, &[0xFD, b'7', b'z', b'X', b'Z', 0], "something compressed with xz", "xz -d unpacks it"),
    (0, b"BZh", "something compressed with bzip2", "bzip2 -d unpacks it"),
    (0, &[0x04, 0x22, 0x4D, 0x18], "something compressed with lz4", "lz4 -d unpacks it"),
    (0, &[0x5D, 0, 0], "something compressed with lzma", "xz -d --format=lzma unpacks it"),
    (0, b"LZIP", "something compressed with lzip", "lzip -d unpacks it"),
    (0, &[0x1F, 0x9D], "something compressed with compress", "gzip -d unpacks it"),
    (0, b"PK\x03\x04", "a ZIP archive", "unzip unpacks it"),
    (0, b"7z\xBC\xAF\x27\x1C", "a 7-Zip archive", "7z x unpacks it"),
    (0, b"Rar!\x1A\x07", "a RAR archive", "unrar unpacks it"),
    (0, b"070701", "a cpio archive", CPIO),
    (0, b"070702", "a cpio archive", CPIO),
    (0, b"070707", "a cpio archive", CPIO),
    (0, &[0xC7, 0x71], "a cpio archive", CPIO),
    (
        0,
        b"!<arch>\ndebian",
        "a Debian package",
        "dpkg-deb --fsys-tarfile makes a tar archive of it",
    ),
    (0, &[0xED, 0xAB, 0xEE, 0xDB], "an RPM package", "rpm2archive makes a tar archive of it"),
    (0, &[0x7F, b'E', b'L', b'F'], "a program or library", "it is no image"),
    (512, b"EFI PART", PARTITIONS, "--partition N takes one"),
    (510, &[0x55, 0xAA], PARTITIONS, "--partition N takes one"),
    // A table may stand where these were before.
    (4096, &[0xFC, 0x4E, 0x2B, 0xA9], "a part of a RAID (md)", "mdadm --assemble puts it together"),
    (
        4120,
        &[0xC6, 0x85, 0x73, 0xF6],
        "a cache or what it is for (bcache)",
        "bcache shows what is in it",
    ),
    (508, &[0xDA, 0xBE], "a disk label of Solaris", "--offset says where a partition begins"),
    (
        0,
        &[0x0B, 0xE5, 0xA9, 0x41],
        "a disk label of IRIX",
        "--offset says where a partition begins",
    ),
];

/// What the first bytes of an image say that it holds.
pub fn of(head: &[u8]) -> Option<Held> {
    let is = |at: usize, bytes: &[u8]| head.get(at..at + bytes.len()) == Some(bytes);
    let found = SIGNATURES.iter().find(|(at, bytes, ..)| is(*at, bytes));
    found.map(|(_, _, what, help)| Held { what, help })
}

/// What a disk holds, as far as that is easily known.
pub fn held(disk: &dyn Disk) -> Option<Held> {
    let properties = disk.properties();
    let sector = u64::from(properties.sector_bytes).max(1);
    let len = properties.len_bytes.min(HEAD_BYTES as u64) / sector * sector;
    let read = disk.read_now(Extent::new(0, len), Block::private(len as usize));
    of(&read.ok()?.into_private())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_is_named() {
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[0; HEAD_BYTES]), None);
        assert_eq!(of(b"XFSB").unwrap().what, "an XFS file system");
        let mut disk = vec![0; 1 << 10];
        disk[510..512].copy_from_slice(&[0x55, 0xAA]);
        assert_eq!(of(&disk).unwrap().what, PARTITIONS);
        disk.resize(2 << 10, 0);
        disk[1080..1082].copy_from_slice(&[0x53, 0xEF]);
        assert_eq!(of(&disk).unwrap().what, "an ext file system");
    }
}
