//! Selection of the partition with an ext volume.

use draconis_device::{Disk, Extent, Partition, TableKind, read_partition_table};
use draconis_types::Block;

use crate::signature::{self, DetectedContent};

/// Partitions of a disk that holds no volume itself.
#[derive(Debug, Default)]
pub struct PartitionSummary {
    /// Partitions with an ext volume.
    pub volumes: Vec<Partition>,
    /// The others, with their contents if known.
    pub others: Vec<(Partition, Option<DetectedContent>)>,
    /// Format of the partition table.
    pub kind: TableKind,
    /// True if the table is the backup of a GPT whose primary copy is damaged or missing.
    pub is_backup: bool,
}

impl PartitionSummary {
    /// Describes all partitions: `1 (a FAT file system), 2 (an ext file system)`.
    pub fn describe(&self) -> String {
        let volumes = self.volumes.iter().map(|part| (part.number, Some("an ext file system")));
        let others = self.others.iter().map(|(part, held)| match held {
            None if part.extent.len_bytes == 0 => {
                (part.number, Some("behind the end of the disk, which is cut off"))
            }
            held => (part.number, held.map(|it| it.what)),
        });
        let mut all: Vec<_> = volumes.chain(others).collect();
        all.sort_unstable();
        let shown: Vec<String> = all
            .iter()
            .map(|(number, what)| format!("{number} ({})", what.unwrap_or("not known")))
            .collect();
        shown.join(", ")
    }
}

/// Lists the partitions of a disk; `None` if it holds a file system itself, or has no table.
pub fn list_partitions(disk: &dyn Disk) -> Option<PartitionSummary> {
    let own = signature::detect(disk);
    if own.is_some_and(|own| own.what != signature::PARTITIONS_DESCRIPTION) {
        return None;
    }
    let table = read_partition_table(disk).ok()?;
    let mut found = PartitionSummary {
        kind: table.kind,
        is_backup: table.is_backup,
        ..PartitionSummary::default()
    };
    for part in table.partitions {
        let held = read_head(disk, part.extent).as_deref().and_then(signature::detect_head);
        match held {
            Some(held) if held.what == "an ext file system" => found.volumes.push(part),
            held => found.others.push((part, held)),
        }
    }
    (!found.volumes.is_empty() || !found.others.is_empty()).then_some(found)
}

/// Returns the first bytes of a partition.
fn read_head(disk: &dyn Disk, part: Extent) -> Option<Vec<u8>> {
    let sector = u64::from(disk.properties().sector_bytes).max(1);
    let len = part.len_bytes.min(signature::HEAD_BYTES as u64) / sector * sector;
    let block = Block::private(len as usize);
    let read = disk.read_now(Extent::new(part.start_bytes, len), block).ok()?;
    Some(read.into_private().to_vec())
}
