//! Every block is read in the role in which it was written.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use draconis_types::{AttributeChange, FileType};

use super::data::SharedBytes;
use super::role::{BlockChecksums, Role};
use crate::format::xattr::XattrSet;
use crate::testing::{FILE, formatted_disk, open_for_writing};
use crate::{FsBlock, NewNode, RenameMode, Result};

#[derive(Clone, Debug, Default)]
struct RoleRecordingChecksums(Arc<Mutex<HashMap<u64, Role>>>);

impl BlockChecksums for RoleRecordingChecksums {
    fn verify_checksum(&self, role: Role, block: FsBlock, _: &[u8]) -> Result<()> {
        let roles = self.0.lock().unwrap();
        let written = roles.get(&block.0).copied().unwrap_or(role);
        assert_eq!(role, written, "block {block}");
        Ok(())
    }

    fn set_checksum(&self, role: Role, block: FsBlock, _: &mut SharedBytes) {
        self.0.lock().unwrap().insert(block.0, role);
    }
}

#[test]
fn blocks_are_read_in_role_they_were_written_in() {
    let disk = formatted_disk(1024, 4 << 20);
    let roles = RoleRecordingChecksums::default();
    for round in 0..3u32 {
        let mut volume = open_for_writing(disk.clone());
        volume.reader.store.checksums = Some(Box::new(roles.clone()));
        let root = volume.root();
        let name = |what: &str, nth: u32| format!("{what} {round} {nth}").into_bytes();
        // Blocks of earlier rounds come from the disk.
        for before in 0..round {
            let old = volume.lookup(root, format!("dir {before} 0").as_bytes()).unwrap();
            let file = volume.lookup(old, format!("file {before} 20").as_bytes()).unwrap();
            assert_eq!(volume.xattr(file, b"user.a").unwrap(), [1; 500]);
            assert_eq!(volume.read(file, 20 * 3000, 900).unwrap()[..], [7; 900]);
        }
        let directory = NewNode { kind: FileType::Directory, mode: 0o755, ..FILE };
        let dir = volume.create(root, &name("dir", 0), &directory).unwrap();
        for nth in 0..200 {
            let file = volume.create(dir, &name("file", nth), &FILE).unwrap();
            volume.write(file, u64::from(nth) * 3000, &[7; 900]).unwrap();
            if nth % 20 == 0 {
                volume.set_xattr(file, b"user.a", &[1; 500], XattrSet::Any, false).unwrap();
                volume.sync().unwrap();
            }
        }
        let target = [b't'; 300];
        let link = NewNode { kind: FileType::Symlink, target: &target, ..FILE };
        let link = volume.create(dir, b"link", &link).unwrap();
        assert_eq!(volume.read_link(link).unwrap()[..], target);
        volume.rename(dir, &name("file", 3), root, &name("out", 3), RenameMode::Replace).unwrap();
        for nth in 50..100 {
            volume.unlink(dir, &name("file", nth)).unwrap();
        }
        let cut = volume.lookup(dir, &name("file", 150)).unwrap();
        let shorter = AttributeChange { size_bytes: Some(10), ..AttributeChange::default() };
        volume.set_attributes(cut, &shorter).unwrap();
        volume.close().unwrap();
    }
    assert!(roles.0.lock().unwrap().len() > 50);
}
