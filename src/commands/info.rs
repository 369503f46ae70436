//! `draconis info`

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use draconis_ext::{Info, Volume};
use draconis_types::Time;
use serde::Serialize;

use crate::image::{self, ReadArgs};
use crate::text::{
    EscapingOutput, TimeFormatter, escape_control_chars, format_bytes, format_uuid, pluralize,
};

/// Show the type, size and features of a volume.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: ReadArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Image: file, block device or STORE#NAME.
    image: PathBuf,
}

/// JSON form of the information about a volume.
#[derive(Serialize)]
struct VolumeJson {
    kind: &'static str,
    label: String,
    uuid: String,
    revision: String,
    features: Vec<String>,
    state: String,
    size_bytes: u64,
    block_size_bytes: u32,
    blocks: u64,
    free_blocks: u64,
    reserved_blocks: u64,
    inodes: u64,
    free_inodes: u64,
    inode_size_bytes: u32,
    groups: u32,
    blocks_per_group: u32,
    inodes_per_group: u32,
    mounts_since_check: u16,
    last_mounted_on: String,
    made: u32,
    mounted: u32,
    written: u32,
    checked: u32,
    read_only_because: Option<String>,
    /// Damage found without a full check, and hints.
    damage: Vec<String>,
    #[serde(skip)]
    needs_preen: bool,
    /// Partition of the image, if the volume is in one.
    partition: Option<PartitionJson>,
}

/// Partition of a volume, in JSON.
#[derive(Serialize)]
struct PartitionJson {
    number: u32,
    table: &'static str,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let clock = TimeFormatter::new();
    let part = image::locate_volume_to_read(&arguments.image, &arguments.place, None)?;
    let partition = part.partition.zip(part.table);
    let partition = partition.map(|(number, table)| PartitionJson { number, table: table.name() });
    let tree = image::open_tree(&arguments.image, part.disk)?;
    let facts = VolumeJson { partition, ..volume_json(tree.volume()) };
    let mut out = EscapingOutput::new();
    if arguments.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&facts)?)?;
    } else {
        write(&facts, &clock, &mut out)?;
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

fn volume_json(volume: &Volume) -> VolumeJson {
    let info = volume.info();
    let mut state = vec![if info.clean { "clean" } else { "not clean" }];
    if info.errors {
        state.push("damaged");
    }
    if info.truncated {
        state.push("image too short");
    }
    let damage = find_damage(volume, &info);
    VolumeJson {
        kind: info.kind,
        label: escape_control_chars(&info.label),
        uuid: format_uuid(info.uuid),
        revision: format!("{}.{}", info.revision.0, info.revision.1),
        features: info.features,
        state: state.join(", "),
        size_bytes: info.len_bytes,
        block_size_bytes: info.space.block_bytes,
        blocks: volume.superblock().blocks,
        free_blocks: info.space.free_blocks,
        reserved_blocks: info.reserved_blocks,
        inodes: info.space.inodes,
        free_inodes: info.space.free_inodes,
        inode_size_bytes: info.inode_bytes,
        groups: info.groups,
        blocks_per_group: info.blocks_per_group,
        inodes_per_group: info.inodes_per_group,
        mounts_since_check: info.mounts,
        last_mounted_on: escape_control_chars(&info.last_mounted),
        made: info.dates.made,
        mounted: info.dates.mounted,
        written: info.dates.written,
        checked: info.dates.checked,
        read_only_because: info.read_only_reason,
        damage,
        needs_preen: volume.needs_preen(),
        partition: None,
    }
}

/// Returns damage visible in the superblock, group descriptors and root directory.
fn find_damage(volume: &Volume, info: &Info) -> Vec<String> {
    let mut damage = vec![];
    if info.truncated {
        damage.push(
            "the image is shorter than the volume: find all of it, or copy what can be read \
             (draconis get -r)"
                .to_string(),
        );
    }
    if let Some(error) = volume.quick_check() {
        damage
            .push(format!("{error}; draconis check shows all damage, draconis repair repairs it"));
    } else if info.errors {
        damage.push(
            "errors were met when it was used: draconis check shows what there is, draconis \
             repair repairs it"
                .to_string(),
        );
    }
    damage
}

fn write(
    facts: &VolumeJson,
    clock: &TimeFormatter,
    out: &mut EscapingOutput,
) -> std::io::Result<()> {
    let date = |seconds: u32| match seconds {
        0 => "never".to_string(),
        _ => clock.format_to_minute(Time { seconds: seconds.into(), nanoseconds: 0 }),
    };
    let or_none = |text: &str| if text.is_empty() { "-".to_string() } else { text.to_string() };
    let mounts = pluralize(facts.mounts_since_check.into(), "mount", "mounts");
    let rows = [
        ("file system", format!("{}, revision {}", facts.kind, facts.revision)),
        ("label", or_none(&facts.label)),
        ("uuid", facts.uuid.clone()),
        ("features", or_none(&facts.features.join(" "))),
        ("state", describe_state(facts)),
        ("size", format_bytes(facts.size_bytes)),
        (
            "blocks",
            format!(
                "{} of {} bytes, {} free, {} reserved",
                facts.blocks, facts.block_size_bytes, facts.free_blocks, facts.reserved_blocks
            ),
        ),
        (
            "inodes",
            format!(
                "{} of {} bytes, {} free",
                facts.inodes, facts.inode_size_bytes, facts.free_inodes
            ),
        ),
        (
            "groups",
            format!(
                "{}, each {} blocks and {} inodes",
                facts.groups, facts.blocks_per_group, facts.inodes_per_group
            ),
        ),
        ("made", date(facts.made)),
        ("written", date(facts.written)),
        ("mounted", format!("{} on {}", date(facts.mounted), or_none(&facts.last_mounted_on))),
        ("checked", format!("{}, {mounts} ago", date(facts.checked))),
    ];
    for (name, value) in rows {
        writeln!(out, "{name:<12} {value}")?;
    }
    if let Some(PartitionJson { number, table }) = &facts.partition {
        writeln!(out, "{:<12} {number} ({table})", "partition")?;
    }
    for damage in &facts.damage {
        writeln!(out, "{:<12} {damage}", "damaged")?;
    }
    if let Some(reason) = &facts.read_only_because {
        writeln!(out, "{:<12} {reason}", "read-only")?;
    }
    Ok(())
}

fn describe_state(facts: &VolumeJson) -> String {
    // Other states mean damage, which `e2fsck -p` may not repair.
    match facts.state.as_str() {
        "not clean" if facts.needs_preen => {
            "not clean: it was not unmounted; e2fsck -p repairs what a power cut left".to_string()
        }
        state => state.to_string(),
    }
}
