use super::*;

fn valid_superblock_bytes() -> Vec<u8> {
    let mut bytes = vec![0; LEN_BYTES];
    let mut put = |at: usize, value: u32| bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    put(0x00, 128); // inodes
    put(0x04, 1024); // blocks
    put(0x14, 1); // first data block
    put(0x20, 8192); // blocks per group
    put(0x28, 128); // inodes per group
    put(0x38, u32::from(MAGIC));
    bytes
}

fn parse_with_field(at: usize, value: u32) -> Result<Superblock> {
    let mut bytes = valid_superblock_bytes();
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    RawSuperblock::view(&bytes)?.check()
}

#[test]
fn revision_0_has_fixed_sizes() {
    let sane = RawSuperblock::view(&valid_superblock_bytes()).unwrap().check().unwrap();
    assert_eq!((sane.inode_bytes, sane.first_inode), (128, InodeNumber(11)));
    assert_eq!((sane.block_bytes, sane.groups), (1024, 1));
}

#[test]
fn every_used_field_is_checked() {
    for (at, value) in [
        (0x00, 0),
        (0x00, 127),
        (0x00, 129),
        (0x04, 1),
        (0x14, 1024),
        (0x18, 7),
        (0x18, u32::MAX),
        (0x20, 0),
        (0x20, 8193),
        (0x28, 0),
        (0x28, 8193),
    ] {
        assert!(
            matches!(parse_with_field(at, value), Err(Error::Corrupt { .. })),
            "{at:#x} = {value}"
        );
    }
    assert_eq!(parse_with_field(0x38, 0).unwrap_err(), Error::NotExt);
}

#[test]
fn lenient_check_accepts_wrong_inode_count() {
    let mut bytes = valid_superblock_bytes();
    bytes[0] = 127;
    let understood = RawSuperblock::view(&bytes).unwrap().check_lenient().unwrap();
    assert_eq!((understood.inodes, understood.inodes_in_groups()), (127, 128));
}

#[test]
fn unsupported_features_are_listed_together() {
    let mut bytes = valid_superblock_bytes();
    bytes[0x4C] = 1;
    bytes[0x58] = 128;
    bytes[0x54] = 11;
    bytes[0x60..0x64].copy_from_slice(&0x1001u32.to_le_bytes());
    let error = RawSuperblock::view(&bytes).unwrap().check().unwrap_err();
    assert_eq!(error.to_string(), "needs: compression, dirdata");
    bytes[0x60..0x64].copy_from_slice(&6u32.to_le_bytes());
    assert!(RawSuperblock::view(&bytes).unwrap().check().unwrap().needs_recovery());
}
