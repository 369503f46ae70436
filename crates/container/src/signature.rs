//! Contents of an image, detected by the signatures of file systems and other formats.

use draconis_device::{Disk, Extent, Partition, read_partitions};
use draconis_types::Block;

use crate::image_file::{be32, le32, le64};

/// Number of bytes at the start that hold signatures.
pub const HEAD_BYTES: usize = 68 << 10;
/// Number of bytes at the end that [`detect_overwritten`] examines.
pub const TAIL_BYTES: usize = 128 << 10;

/// Contents other than an ext volume, and a remedy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DetectedContent {
    /// Kind, in one word: users type it to confirm overwriting.
    pub kind: &'static str,
    /// Description with an article.
    pub what: &'static str,
    /// Possible next steps; never overwriting.
    pub help: &'static str,
}

impl DetectedContent {
    /// Returns true for a compressed file, which may hold anything.
    pub fn is_compressed(&self) -> bool {
        self.what.starts_with(COMPRESSED_PREFIX)
    }

    /// Returns true for a partition table.
    pub fn has_partitions(&self) -> bool {
        self.what == PARTITIONS_DESCRIPTION
    }
}

const MOUNT_REMEDY: &str = "mount(8) mounts it";
const CPIO_REMEDY: &str = "bsdtar -cf TAR @FILE makes a tar archive of it";
const RAW_REMEDY: &str = "qemu-img convert -O raw makes one that is read";
const SWAP_REMEDY: &str = "swapon(8) uses it";
const LVM_REMEDY: &str = "vgchange -ay shows what is in it as devices";
const RAID_REMEDY: &str = "mdadm --assemble puts it together";
const COMPRESSED_PREFIX: &str = "something compressed with ";

/// First bytes of an md superblock, in big-endian order; those of 0.90 are in the order of the host.
const MD_MAGIC_ON_DISK: u32 = 0xFC4E_2BA9;

/// Description of a disk with partitions; a boot sector looks the same.
pub const PARTITIONS_DESCRIPTION: &str = "a partition table or boot sector";
const PARTITION_REMEDY: &str = "--partition N takes one";
/// Kind of an ext file system.
pub const EXT_KIND: &str = "ext";
/// End of the superblock of an ext volume.
const SUPERBLOCK_END: usize = 2048;
/// Kind of a store.
pub const STORE_KIND: &str = "store";

/// Member of a RAID.
pub const RAID_CONTENT: DetectedContent =
    DetectedContent { kind: "md", what: "a part of a RAID (md)", help: RAID_REMEDY };

/// External journal of an ext volume.
const JOURNAL_CONTENT: DetectedContent = DetectedContent {
    kind: "journal",
    what: "an external journal of an ext volume",
    help: "the volume on the other device needs it",
};

/// Kind, offset of the signature, signature, description, remedy.
type SignatureRow = (&'static str, usize, &'static [u8], &'static str, &'static str);

/// All signatures. The first match counts: a file system precedes formats whose signatures it may
/// leave in place.
const SIGNATURES: &[SignatureRow] = &[
    (EXT_KIND, 1080, &[0x53, 0xEF], "an ext file system", "draconis info shows it"),
    (STORE_KIND, 0, b"DracoObj", "a store", "draconis store reads it"),
    ("xfs", 0, b"XFSB", "an XFS file system", MOUNT_REMEDY),
    ("btrfs", 65600, b"_BHRfS_M", "a Btrfs file system", MOUNT_REMEDY),
    ("swap", 4086, b"SWAPSPACE2", "swap space", SWAP_REMEDY),
    ("swap", 65526, b"SWAPSPACE2", "swap space", SWAP_REMEDY),
    ("swap", 8182, b"SWAPSPACE2", "swap space", SWAP_REMEDY),
    ("swap", 16374, b"SWAPSPACE2", "swap space", SWAP_REMEDY),
    ("swap", 32758, b"SWAPSPACE2", "swap space", SWAP_REMEDY),
    ("swap", 4086, b"SWAP-SPACE", "swap space", SWAP_REMEDY),
    ("swap", 4086, b"S1SUSPEND", "a machine that sleeps, in swap space", "resuming it uses it"),
    ("swap", 4086, b"S2SUSPEND", "a machine that sleeps, in swap space", "resuming it uses it"),
    ("swap", 4086, b"ULSUSPEND", "a machine that sleeps, in swap space", "resuming it uses it"),
    ("swap", 4086, b"LINHIB0001", "a machine that sleeps, in swap space", "resuming it uses it"),
    ("ntfs", 3, b"NTFS ", "an NTFS file system", "mount -t ntfs3 mounts it"),
    ("exfat", 3, b"EXFAT ", "an exFAT file system", MOUNT_REMEDY),
    ("fat", 54, b"FAT", "a FAT file system", MOUNT_REMEDY),
    ("fat", 82, b"FAT32", "a FAT file system", MOUNT_REMEDY),
    ("squashfs", 0, b"hsqs", "a SquashFS file system", "unsquashfs unpacks it"),
    (
        "erofs",
        1024,
        &[0xE2, 0xE1, 0xF5, 0xE0],
        "an EROFS file system",
        "fsck.erofs --extract unpacks it",
    ),
    ("f2fs", 1024, &[0x10, 0x20, 0xF5, 0xF2], "an F2FS file system", MOUNT_REMEDY),
    (
        "iso9660",
        32769,
        b"CD001",
        "an ISO 9660 file system",
        "mount -o loop mounts it, bsdtar -x unpacks it",
    ),
    ("udf", 32769, b"BEA01", "a UDF file system", MOUNT_REMEDY),
    ("udf", 32769, b"NSR02", "a UDF file system", MOUNT_REMEDY),
    ("udf", 32769, b"NSR03", "a UDF file system", MOUNT_REMEDY),
    (
        "luks",
        0,
        b"LUKS\xBA\xBE",
        "an encrypted volume (LUKS)",
        "cryptsetup open shows what is in it as a device",
    ),
    ("lvm", 536, b"LVM2 001", "an LVM physical volume", LVM_REMEDY),
    ("lvm", 24, b"LVM2 001", "an LVM physical volume", LVM_REMEDY),
    ("lvm", 1048, b"LVM2 001", "an LVM physical volume", LVM_REMEDY),
    ("lvm", 1560, b"LVM2 001", "an LVM physical volume", LVM_REMEDY),
    (
        "bitlocker",
        3,
        b"-FVE-FS-",
        "an encrypted volume (BitLocker)",
        "dislocker shows what is in it",
    ),
    ("hfsplus", 1024, b"H+\0\x04", "an HFS+ file system", MOUNT_REMEDY),
    ("apfs", 32, b"NXSB", "an APFS container", "apfs-fuse mounts it"),
    ("reiserfs", 65588, b"ReIsEr", "a ReiserFS file system", "a Linux before 6.13 mounts it"),
    ("jfs", 32768, b"JFS1", "a JFS file system", MOUNT_REMEDY),
    ("gfs2", 65536, &[0x01, 0x16, 0x19, 0x70], "a GFS2 file system", MOUNT_REMEDY),
    ("nilfs2", 1030, &[0x34, 0x34], "a NILFS2 file system", MOUNT_REMEDY),
    ("minix", 1040, &[0x7F, 0x13], "a Minix file system", MOUNT_REMEDY),
    ("minix", 1040, &[0x8F, 0x13], "a Minix file system", MOUNT_REMEDY),
    ("minix", 1040, &[0x68, 0x24], "a Minix file system", MOUNT_REMEDY),
    ("minix", 1040, &[0x78, 0x24], "a Minix file system", MOUNT_REMEDY),
    ("minix", 1048, &[0x5A, 0x4D], "a Minix file system", MOUNT_REMEDY),
    ("cramfs", 0, &[0x45, 0x3D, 0xCD, 0x28], "a cramfs file system", MOUNT_REMEDY),
    ("romfs", 0, b"-rom1fs-", "a romfs file system", MOUNT_REMEDY),
    ("ubi", 0, b"UBI#", "an image for raw flash (UBI)", "ubireader unpacks it"),
    ("qcow2", 0, b"QFI\xFB", "a QCOW2 disk image", RAW_REMEDY),
    ("vhdx", 0, b"vhdxfile", "a VHDX disk image", RAW_REMEDY),
    ("vhd", 0, b"conectix", "a VHD disk image", RAW_REMEDY),
    ("vmdk", 0, b"KDMV", "a VMDK disk image", RAW_REMEDY),
    (
        "vmdk",
        0,
        b"# Disk DescriptorFile",
        "a description of a VMDK disk image",
        "it names the files that hold the disk",
    ),
    (
        "android",
        0,
        &[0x3A, 0xFF, 0x26, 0xED],
        "an Android sparse image",
        "simg2img makes a raw one of it",
    ),
    ("vdi", 64, &[0x7F, 0x10, 0xDA, 0xBE], "a VDI disk image", RAW_REMEDY),
    ("qed", 0, b"QED\0", "a QED disk image", RAW_REMEDY),
    ("parallels", 0, b"WithoutFreeSpace", "a Parallels disk image", RAW_REMEDY),
    ("parallels", 0, b"WithouFreSpacExt", "a Parallels disk image", RAW_REMEDY),
    ("wim", 0, b"MSWIM\0\0\0", "a Windows image (WIM)", "wimlib-imagex unpacks it"),
    ("tar", 257, b"ustar", "a tar archive", "tar -tf lists it"),
    (
        "gzip",
        0,
        &[0x1F, 0x8B, 8],
        "something compressed with gzip",
        "ls, get and tar read it so, gzip -d unpacks it for a mount",
    ),
    (
        "zstd",
        0,
        &[0x28, 0xB5, 0x2F, 0xFD],
        "something compressed with zstd",
        "ls, get and tar read it so, zstd -d unpacks it for a mount",
    ),
    (
        "xz",
        0,
        &[0xFD, b'7', b'z', b'X', b'Z', 0],
        "something compressed with xz",
        "xz -d unpacks it",
    ),
    ("bzip2", 0, b"BZh", "something compressed with bzip2", "bzip2 -d unpacks it"),
    ("lz4", 0, &[0x04, 0x22, 0x4D, 0x18], "something compressed with lz4", "lz4 -d unpacks it"),
    ("lzma", 0, &[0x5D, 0, 0], "something compressed with lzma", "xz -d --format=lzma unpacks it"),
    ("lzip", 0, b"LZIP", "something compressed with lzip", "lzip -d unpacks it"),
    ("compress", 0, &[0x1F, 0x9D], "something compressed with compress", "gzip -d unpacks it"),
    ("lzop", 0, &[0x89, b'L', b'Z', b'O'], "something compressed with lzop", "lzop -d unpacks it"),
    ("zip", 0, b"PK\x03\x04", "a ZIP archive", "unzip unpacks it"),
    ("7z", 0, b"7z\xBC\xAF\x27\x1C", "a 7-Zip archive", "7z x unpacks it"),
    ("rar", 0, b"Rar!\x1A\x07", "a RAR archive", "unrar unpacks it"),
    ("cpio", 0, b"070701", "a cpio archive", CPIO_REMEDY),
    ("cpio", 0, b"070702", "a cpio archive", CPIO_REMEDY),
    ("cpio", 0, b"070707", "a cpio archive", CPIO_REMEDY),
    ("cpio", 0, &[0xC7, 0x71], "a cpio archive", CPIO_REMEDY),
    (
        "deb",
        0,
        b"!<arch>\ndebian",
        "a Debian package",
        "dpkg-deb --fsys-tarfile makes a tar archive of it",
    ),
    (
        "rpm",
        0,
        &[0xED, 0xAB, 0xEE, 0xDB],
        "an RPM package",
        "rpm2archive makes a tar archive of it",
    ),
    ("elf", 0, &[0x7F, b'E', b'L', b'F'], "a program or library", "it is no image"),
    ("gpt", 512, b"EFI PART", PARTITIONS_DESCRIPTION, PARTITION_REMEDY),
    ("gpt", 4096, b"EFI PART", PARTITIONS_DESCRIPTION, PARTITION_REMEDY),
    ("mbr", 510, &[0x55, 0xAA], PARTITIONS_DESCRIPTION, PARTITION_REMEDY),
    // A partition table may precede remains of these.
    ("md", 4096, &[0xFC, 0x4E, 0x2B, 0xA9], "a part of a RAID (md)", RAID_REMEDY),
    ("md", 0, &[0xFC, 0x4E, 0x2B, 0xA9], "a part of a RAID (md)", RAID_REMEDY),
    (
        "bcache",
        4120,
        &[0xC6, 0x85, 0x73, 0xF6],
        "a cache or what it is for (bcache)",
        "bcache shows what is in it",
    ),
    (
        "solaris",
        508,
        &[0xDA, 0xBE],
        "a disk label of Solaris",
        "--offset says where a partition begins",
    ),
    (
        "irix",
        0,
        &[0x0B, 0xE5, 0xA9, 0x41],
        "a disk label of IRIX",
        "--offset says where a partition begins",
    ),
];

/// Detects the contents by the first bytes of an image.
pub fn detect_head(head: &[u8]) -> Option<DetectedContent> {
    let is = |at: usize, bytes: &[u8]| head.get(at..at + bytes.len()) == Some(bytes);
    let is_whole = |kind: &str| kind != EXT_KIND || head.len() >= SUPERBLOCK_END;
    let found = SIGNATURES.iter().find(|(kind, at, bytes, ..)| is(*at, bytes) && is_whole(kind));
    found.map(|(kind, _, _, what, help)| DetectedContent { kind, what, help })
}

/// Returns the contents that overwriting a whole file or device destroys, by its first and last
/// bytes. Unlike [`detect_head`] it reports a partition table over the remains of an earlier ext volume.
pub fn detect_overwritten(head: &[u8], tail: &[u8]) -> Option<DetectedContent> {
    /// Offset and bit of the superblock flag of a journal device.
    const JOURNAL_DEV_FEATURE: (usize, u8) = (1024 + 96, 8);
    let found = detect_head(head).or_else(|| detect_tail(tail));
    if found.is_none_or(|found| ![EXT_KIND, STORE_KIND].contains(&found.kind)) {
        return found;
    }
    // The volume or store is that of the array.
    if let Some(raid) = detect_tail(tail).filter(|it| *it == RAID_CONTENT) {
        return Some(raid);
    }
    if found.is_none_or(|found| found.kind != EXT_KIND) {
        return found;
    }
    if has_partitions(head) {
        return Some(DetectedContent {
            kind: "mbr",
            what: PARTITIONS_DESCRIPTION,
            help: PARTITION_REMEDY,
        });
    }
    let (at, bit) = JOURNAL_DEV_FEATURE;
    match head.get(at) {
        Some(byte) if byte & bit != 0 => Some(JOURNAL_CONTENT),
        _ => found,
    }
}

/// Returns true if the first sector has a partition table with entries, unlike boot code of a
/// volume.
fn has_partitions(head: &[u8]) -> bool {
    let Some(table) = head.get(446..510) else { return false };
    let (entries, _) = table.as_chunks::<16>();
    let is_used = |entry: &[u8; 16]| entry[4] != 0 && !entry.ends_with(&[0; 4]);
    head.get(510..512) == Some(&[0x55, 0xAA])
        && entries.iter().all(|entry| entry[0] & 0x7F == 0)
        && entries.iter().any(is_used)
}

/// Detects contents with a signature at the end of a device.
fn detect_tail(tail: &[u8]) -> Option<DetectedContent> {
    let is = |from_end: usize, bytes: &[u8]| {
        let at = tail.len().checked_sub(from_end);
        at.and_then(|at| tail.get(at..at + bytes.len())) == Some(bytes)
    };
    if is(512, b"EFI PART") || is(4096, b"EFI PART") {
        return Some(DetectedContent {
            kind: "gpt",
            what: PARTITIONS_DESCRIPTION,
            help: PARTITION_REMEDY,
        });
    }
    // Superblocks 0.90 and 1.0: in the last 64 to 128, and 8 to 12 KiB.
    let magic = &MD_MAGIC_ON_DISK.to_be_bytes();
    let old = (64..=128).step_by(4).any(|kib| is(kib << 10, magic));
    let new = (16..24).any(|sectors| is(sectors * 512, magic));
    (old || new).then_some(RAID_CONTENT)
}

/// Member of an md array whose superblock is at the end, so that the array's contents are at the
/// start: a volume in it looks like one of its own.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "it is a member of a RAID (md {version}, UUID {uuid}), and a change of it alone splits the \
     array; mdadm --assemble makes the array a device, and --force=raid-member, at a mount \
     -o force=raid-member, changes the member nevertheless"
)]
pub struct RaidMember {
    /// Version of the superblock.
    pub version: &'static str,
    /// UUID of the array, as mdadm shows it.
    pub uuid: String,
}

/// Refuses to write to a member of an array: to `part`, or to the disk `whole` that it is in.
///
/// # Errors
/// The member.
pub fn refuse_raid_member(whole: &dyn Disk, part: &dyn Disk) -> Result<(), RaidMember> {
    [whole, part].into_iter().find_map(find_raid_member).map_or(Ok(()), Err)
}

/// Finds an md superblock of version 1.0 or 0.90 at the end of a disk.
pub fn find_raid_member(disk: &dyn Disk) -> Option<RaidMember> {
    const OLD_UNIT_BYTES: u64 = 64 << 10;
    let sectors = disk.properties().len_bytes / 512;
    let format_uuid = |words: [u32; 4]| words.map(|word| format!("{word:08x}")).join(":");
    let read = |at: u64| {
        let read = disk.read_now(Extent::new(at, 4096), Block::private(4096)).ok()?;
        let bytes = read.into_private();
        let is_little = be32(&bytes, 0) == MD_MAGIC_ON_DISK;
        (is_little || le32(&bytes, 0) == MD_MAGIC_ON_DISK).then_some((bytes, is_little))
    };
    if let Some(at) = sectors.checked_sub(16).map(|sector| sector & !7)
        && let Some((bytes, true)) = read(at * 512)
        && (le32(&bytes, 4), le64(&bytes, 144)) == (1, at)
    {
        let uuid = format_uuid([16, 20, 24, 28].map(|at| be32(&bytes, at)));
        return Some(RaidMember { version: "1.0", uuid });
    }
    let units = sectors * 512 / OLD_UNIT_BYTES;
    let at = units.checked_sub(1)? * OLD_UNIT_BYTES;
    let (bytes, is_little) = read(at)?;
    let word = |nth: usize| if is_little { le32(&bytes, nth * 4) } else { be32(&bytes, nth * 4) };
    let is_old = word(1) == 0 && word(2) >= 90;
    // The superblock does not say where it is: it may be that of the last partition.
    let has_superblock = |part: &Partition| {
        (part.extent.start_bytes..part.extent.start_bytes + part.extent.len_bytes).contains(&at)
    };
    let is_in_partition = || read_partitions(disk).is_ok_and(|all| all.iter().any(has_superblock));
    (is_old && !is_in_partition())
        .then(|| RaidMember { version: "0.90", uuid: format_uuid([5, 13, 14, 15].map(word)) })
}

/// Detects the contents of a disk.
pub fn detect(disk: &dyn Disk) -> Option<DetectedContent> {
    let properties = disk.properties();
    let sector = u64::from(properties.sector_bytes).max(1);
    let len = properties.len_bytes.min(HEAD_BYTES as u64) / sector * sector;
    let read = disk.read_now(Extent::new(0, len), Block::private(len as usize));
    detect_head(&read.ok()?.into_private())
}

#[cfg(test)]
mod tests {
    use draconis_device::{MemoryDisk, SubDisk};

    use super::*;

    #[test]
    fn head_signatures_are_detected() {
        assert_eq!(detect_head(&[]), None);
        assert_eq!(detect_head(&[0; HEAD_BYTES]), None);
        assert_eq!(detect_head(b"XFSB").unwrap().what, "an XFS file system");
        let mut disk = vec![0; 1 << 10];
        disk[510..512].copy_from_slice(&[0x55, 0xAA]);
        assert_eq!(detect_head(&disk).unwrap().what, PARTITIONS_DESCRIPTION);
        disk.resize(2 << 10, 0);
        disk[1080..1082].copy_from_slice(&[0x53, 0xEF]);
        assert_eq!(detect_head(&disk).unwrap().what, "an ext file system");
        assert_ne!(detect_head(&disk[..1536]).map(|it| it.kind), Some(EXT_KIND), "cut off");
        assert_eq!(detect_overwritten(&disk, &[]).unwrap().kind, EXT_KIND);
        // Boot code has no partitions; a partition table has, and precedes remains of earlier
        // contents.
        disk[450] = 0x83;
        disk[458] = 1;
        assert_eq!(detect_overwritten(&disk, &[]).unwrap().kind, "mbr");
        disk[446] = 0x31;
        disk[1120] = 8;
        assert_eq!(detect_overwritten(&disk, &[]).unwrap().kind, "journal");
    }

    #[test]
    fn tail_signatures_are_detected() {
        let mut tail = vec![0; TAIL_BYTES];
        assert_eq!(detect_overwritten(&[0; HEAD_BYTES], &tail), None);
        let len = tail.len();
        tail[len - 8192..][..4].copy_from_slice(&[0xFC, 0x4E, 0x2B, 0xA9]);
        let mut head = [0; HEAD_BYTES];
        assert_eq!(detect_overwritten(&head, &tail).unwrap().kind, "md");
        head[1080..1082].copy_from_slice(&[0x53, 0xEF]);
        assert_eq!(detect_overwritten(&head, &tail).unwrap().kind, "md");
        tail[len - 512..][..8].copy_from_slice(b"EFI PART");
        assert_eq!(detect_overwritten(&[0; HEAD_BYTES], &tail).unwrap().kind, "gpt");
    }

    /// A superblock 0.90 of the last partition lies where that of the whole disk would.
    #[test]
    fn raid_superblock_of_a_partition_is_not_the_disks() {
        const LEN: u64 = 4 << 20;
        let at = (LEN - 65536) as usize;
        let mut bytes = vec![0; LEN as usize];
        for (nth, word) in [0xa92b_4efc_u32, 0, 90].into_iter().enumerate() {
            bytes[at + nth * 4..][..4].copy_from_slice(&word.to_be_bytes());
        }
        let find = |bytes: &[u8], start: u64| {
            let disk = std::sync::Arc::new(MemoryDisk::new(bytes.to_vec(), 512));
            find_raid_member(&SubDisk::from_offset(disk, start).unwrap())
        };
        assert_eq!(find(&bytes, 0).unwrap().version, "0.90");
        // One partition, from 1 MiB to the end.
        bytes[510..512].copy_from_slice(&[0x55, 0xAA]);
        bytes[450] = 0x83;
        bytes[454..458].copy_from_slice(&2048u32.to_le_bytes());
        bytes[458..462].copy_from_slice(&6144u32.to_le_bytes());
        assert_eq!(find(&bytes, 0), None);
        assert_eq!(find(&bytes, 1 << 20).unwrap().version, "0.90");
        assert_eq!(find(&bytes[..32768], 0), None, "too short");
        // Version 1.0 says where it is.
        bytes[at..at + 12].fill(0);
        let at = LEN as usize - 8192;
        bytes[at..at + 8].copy_from_slice(&[0xFC, 0x4E, 0x2B, 0xA9, 1, 0, 0, 0]);
        assert_eq!(find(&bytes, 0), None, "of another disk");
        bytes[at + 144..at + 152].copy_from_slice(&(at as u64 / 512).to_le_bytes());
        assert_eq!(find(&bytes, 0).unwrap().version, "1.0");
    }

    /// The remedy for a read error must not destroy the contents found.
    #[test]
    fn remedies_do_not_overwrite_data() {
        assert!(SIGNATURES.iter().all(|(.., help)| !help.contains("draconis format")));
    }
}
