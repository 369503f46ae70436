//! `draconis format`: creates an ext2, ext3 or ext4 volume, empty or filled.
//!
//! Law: targets in use, and existing contents unless forced, are not touched.

mod contents;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, anyhow, bail};
use clap::{Args, ValueEnum};
use draconis_access::VolumeLocation;
use draconis_access::format::{FormatDestination, PartitionTarget, write};
use draconis_access::overwrite::OverwritePermission;
use draconis_access::populate::{self, ScanResult, SourceSpec};
use draconis_access::uuid::{self, UuidGenerator};
use draconis_container::Format;
use draconis_container::create::NewFormat;
use draconis_ext::format::features::{Compatible, Incompatible};
use draconis_ext::mkfs::{self, FormatOptions, FreeSpace, InodeCount, Tree, VolumePlan};
use draconis_types::lock::Mutex;
use draconis_types::path_bytes::ShowPath;

use crate::archive_args::ArchiveArgs;
use crate::edit::OwnerArg;
use crate::image::Force;
use crate::progress::{ByteProgress, ProgressMode};
use crate::{image, report, text};

const FORMAT_OPTIONS: &str = "\
Options for -E, separated by commas:
  offset=BYTES         start of the volume in IMAGE, as --offset
  root_owner=UID:GID   owner of the root directory; without UID:GID the current user
                       (default: the current user; with --from the owner in the source)
  hash_seed=UUID       seed of directory hashes (random)
  hash_alg=NAME        hash of indexed directories: legacy, half_md4, tea (half_md4)
  stride=BLOCKS        RAID chunk size in blocks
  stripe_width=BLOCKS  RAID stripe size in blocks
  resize=BLOCKS        maximum size for online growth, in blocks (1024 times the size)
  num_backup_sb=N      superblock backups with sparse_super2: 0 to 2 (2)
  packed_meta_blocks   place bitmaps, inode tables and journal at the start of the volume
  encoding=utf8        character encoding of names with casefold; encoding_flags=strict refuses
                       invalid names
  quotatype=KIND:KIND  tracked quotas with quota: usrquota, grpquota, prjquota (the first two,
                       and prjquota with project)
  mmp_update_interval=SECONDS
                       MMP update interval in seconds, up to 300 (5)
Accepted and ignored: lazy_itable_init, lazy_journal_init, discard, nodiscard. Inode tables and
journal always read as zeros.

Options for -J, separated by commas:
  size=MIB             journal size, 1024 to 10240000 blocks (by volume size)
  fast_commit_size=KIB size of the fast commit area, with fast_commit
  location=BLOCK       first block of the journal (in the middle of the volume)

Features for -O; ^FEATURE disables one, none disables all:
  of every type        ext_attr, resize_inode, dir_index, filetype, sparse_super, large_file
  of ext3 and ext4     has_journal
  of ext4              extent, 64bit, flex_bg, metadata_csum, huge_file, dir_nlink, extra_isize
  beyond these         metadata_csum_seed, uninit_bg, sparse_super2, meta_bg, large_dir,
                       orphan_file, fast_commit, stable_inodes, ea_inode, casefold, encrypt,
                       verity, project, quota, inline_data, bigalloc, mmp

Sources for --from, besides DIR and TAR:
  oci:DIR[:TAG]             a container image in a directory (umoci, skopeo)
  oci-archive:FILE[:TAG]    the same in a tar archive
  docker-archive:FILE[:TAG] what docker save writes
Later archives and image layers override earlier ones: .wh.NAME removes NAME, .wh..wh..opq
removes the earlier contents of its directory. Digests are verified. Nothing is unpacked to the
host, and no daemon is used.

--reproducible creates identical images from identical sources on any machine; so does --seed N
with SOURCE_DATE_EPOCH in the environment. Later timestamps are reduced to SOURCE_DATE_EPOCH.";

/// Create an ext2, ext3 or ext4 volume, optionally filled with files.
///
/// Options and on-disk layout follow mke2fs.
#[derive(Debug, Args)]
#[command(after_long_help = FORMAT_OPTIONS)]
pub struct Arguments {
    /// File system type: ext2, ext3 or ext4; selects the default features.
    #[arg(short = 't', value_name = "TYPE", default_value = "ext4")]
    kind: String,
    /// Usage type, as in mke2fs.conf: floppy, small, news, default, largefile, largefile4, big or
    /// huge. Sets block size and bytes per inode.
    #[arg(short = 'T', value_name = "USAGE")]
    usage: Option<UsageType>,
    /// Block size in bytes, 1024 to 65536 (default: by volume size).
    #[arg(short = 'b', value_name = "SIZE", value_parser = text::parse_size)]
    block: Option<u64>,
    /// Cluster size in bytes for bigalloc, a power of two (default: 16 blocks).
    #[arg(short = 'C', value_name = "SIZE", value_parser = text::parse_size)]
    cluster: Option<u64>,
    /// Bytes per inode.
    #[arg(short = 'i', value_name = "BYTES_PER_INODE", value_parser = text::parse_size, conflicts_with = "inodes")]
    bytes_per_inode: Option<u64>,
    /// Number of inodes.
    #[arg(short = 'N', value_name = "INODES")]
    inodes: Option<u32>,
    /// Inode size in bytes.
    #[arg(short = 'I', value_name = "INODE_SIZE", value_parser = text::parse_size, default_value = "256")]
    inode_size: u64,
    /// Label, at most 16 bytes.
    #[arg(short = 'L', value_name = "LABEL", default_value = "")]
    label: String,
    /// UUID, or random, time, clear.
    #[arg(short = 'U', value_name = "UUID", default_value = "random")]
    uuid: String,
    /// Enable features, or disable them with ^, comma-separated.
    #[arg(short = 'O', value_name = "FEATURE,^FEATURE", allow_hyphen_values = true)]
    features: Vec<String>,
    /// Percentage of blocks reserved for the superuser.
    #[arg(short = 'm', value_name = "PERCENT", default_value = "5")]
    reserved: String,
    /// Number of groups per flex group, a power of two.
    #[arg(short = 'G', value_name = "GROUPS", default_value = "16")]
    flex_groups: u32,
    /// Journal options, comma-separated; see below.
    #[arg(short = 'J', value_name = "OPTIONS")]
    journal: Vec<String>,
    /// Extended options, comma-separated; see below.
    #[arg(short = 'E', value_name = "OPTIONS")]
    extended: Vec<String>,
    /// Copy files from a directory, tar archive (plain, gzip, zstd or xz) or container image; - for
    /// standard input; see below. Repeatable: later archives and images
    /// override earlier ones.
    #[arg(long, short = 'd', value_name = "DIR|TAR|IMAGE|-")]
    from: Vec<SourceSpec>,
    /// How archives and images are read.
    #[command(flatten)]
    reading: ArchiveArgs,
    /// Copy only the files listed in LIST, separated by newlines or NULs; - for standard input.
    #[arg(long, value_name = "LIST", requires = "from")]
    list: Option<PathBuf>,
    /// Set the owner of all files.
    #[arg(long, value_name = "UID:GID", requires = "from", conflicts_with = "squash")]
    owner: Option<OwnerArg>,
    /// Set the owner of all files to root; keep modes.
    #[arg(long, requires = "from")]
    squash: bool,
    /// Clear group and other permissions and access control lists.
    #[arg(long, requires = "from")]
    squash_perms: bool,
    /// Create device nodes from a genext2fs device table.
    #[arg(long, short = 'D', value_name = "TABLE")]
    devices: Option<PathBuf>,
    /// Create identical images from identical sources; timestamps come from SOURCE_DATE_EPOCH or
    /// the newest file, UUID and hash seed from the tree.
    #[arg(long, requires = "from", conflicts_with = "seed")]
    reproducible: bool,
    /// Free space to add if SIZE is omitted, such as 64M or 20% (default: 10%, at least 16 MiB).
    #[arg(long, value_name = "SIZE|PERCENT", value_parser = parse_free_space, requires = "from", conflicts_with = "size")]
    free: Option<FreeSpace>,
    /// Create the smallest volume that holds the files.
    #[arg(long, requires = "from", conflicts_with_all = ["size", "free"])]
    min: bool,
    /// Derive UUID and hash seed from N.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Image format: raw, qcow2 or vhdx.
    #[arg(long, value_enum, value_name = "FORMAT")]
    image_format: Option<ImageFormat>,
    /// Overwrite an existing ext volume in IMAGE. Other data needs its kind, such as --force=gpt;
    /// the error names it. Compressed files are never overwritten.
    #[arg(short = 'F', long, value_name = "KIND", num_args = 0..=1, require_equals = true,
        default_missing_value = "")]
    force: Option<OverwritePermission>,
    /// Use partition N of IMAGE, counted from 1; write nothing else.
    #[arg(long, value_name = "N", conflicts_with_all = ["offset", "image_format"])]
    partition: Option<u32>,
    /// Start of the volume in IMAGE, in bytes (suffixes K, M, G); it ends with its partition or
    /// disk. Also -E offset=BYTES.
    #[arg(long, value_name = "BYTES", value_parser = text::parse_size, conflicts_with = "image_format")]
    offset: Option<u64>,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = ProgressMode::Auto)]
    progress: ProgressMode,
    /// Show no progress.
    #[arg(short = 'q', long, conflicts_with = "progress")]
    quiet: bool,
    /// Image: file, block device or STORE#NAME; a missing file is created.
    image: PathBuf,
    /// Size in KiB, in blocks with -b, or with a suffix K, M, G, T (default: size of IMAGE, or as
    /// needed by --from).
    size: Option<String>,
}

/// Image formats for new volumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ImageFormat {
    Raw,
    Qcow2,
    Vhdx,
}

impl ImageFormat {
    /// Returns the disk image format; `None` for raw.
    fn disk_image_format(self) -> Option<NewFormat> {
        match self {
            Self::Raw => None,
            Self::Qcow2 => Some(NewFormat::Qcow2),
            Self::Vhdx => Some(NewFormat::Vhdx),
        }
    }
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let image = &arguments.image;
    let shown = image.shown();
    let (mut options, root_owner) = format_options(arguments)?;
    // If it fills the volume, the process stays unconfined, because it must open the sources.
    let mut sources = populate::sources_to_protect(&arguments.from);
    let lists = [&arguments.list, &arguments.devices];
    lists.into_iter().flatten().for_each(|file| sources.add(file));
    sources.refuse_source_as_destination(image)?;
    let confine = || match arguments.from.is_empty() {
        true => image::confine_to_open_files(),
        false => Ok(()),
    };
    let offset_bytes = arguments.offset.or(offset_option(arguments)?);
    let at = VolumeLocation {
        offset_bytes,
        partition: arguments.partition,
        ..VolumeLocation::default()
    };
    let force = arguments.force.clone().unwrap_or_default();
    let member = force.allows_raid_member().then_some(Force::RaidMember);
    let opened = match image::parse_store_disk(image)? {
        _ if at.offset_bytes.is_some() || at.partition.is_some() => {
            let whole = image::open_writable(image, member)?;
            confine()?;
            FormatDestination::Part(PartitionTarget::locate(image, whole.into_disk()?, &at)?)
        }
        Some(name) => {
            let store = image::open_store_disk_exclusive(name, member)?;
            FormatDestination::open_store_disk(store, confine)?
        }
        None => FormatDestination::open(image, confine)?,
    };
    opened.check_overwrite(image, &force, "--force")?;
    if let (Some(held), None) = (opened.container_format()?, arguments.image_format) {
        let anew = match held {
            Format::Qcow2 => "--image-format qcow2 makes it anew, and ",
            Format::Vhdx => "--image-format vhdx makes it anew, and ",
            _ => "",
        };
        bail!(
            "{shown} is a {} image: {anew}--image-format raw puts a plain volume in its place",
            held.name()
        );
    }
    let opened = match arguments.image_format {
        None => opened.preserve_vhd_footer()?,
        Some(_) => opened,
    };
    let ScanResult { mut source, config } = contents::scan_sources(arguments, &mut options)?;
    if let Some((uid, gid)) = root_owner
        && let Some(root) = source.tree.node_mut(draconis_ext::mkfs::NodeId::ROOT)
    {
        (root.uid, root.gid) = (uid, gid);
    }
    let wants_journal = options.compatible.contains(Compatible::HAS_JOURNAL);
    let plan = plan_volume(arguments, &options, &opened, &mut source.tree)?;
    let progress = Mutex::new(ByteProgress::new(
        if arguments.quiet { ProgressMode::Never } else { arguments.progress },
        plan.data_bytes(),
    ));
    let count = |bytes| progress.lock().add(bytes);
    let format = arguments.image_format.and_then(ImageFormat::disk_image_format);
    arguments.reading.refuse_config_overwrite(&sources)?;
    write(image, opened, &plan, &*source.contents, format, &count)?;
    drop(progress);
    if config.is_some() {
        sources.add(image);
    }
    arguments.reading.write_config(config.as_deref(), &sources)?;
    let faults = source.faults.messages();
    report::print_notes(&faults);
    let superblock = plan.layout().superblock();
    if superblock.journal.is_none() && wants_journal {
        log::warn!("{shown}: too small for a journal; made without one");
    }
    log::info!(
        "{shown}: {}, {}, {} blocks of {} bytes, {} inodes",
        superblock.kind(),
        text::format_bytes(plan.layout().len_bytes()),
        superblock.blocks,
        superblock.block_bytes,
        superblock.inodes
    );
    Ok(if faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Returns the offset from `-E offset=`, in bytes.
fn offset_option(arguments: &Arguments) -> anyhow::Result<Option<u64>> {
    let mut options = arguments.extended.iter().flat_map(|list| list.split(','));
    let Some(text) = options.find_map(|option| option.strip_prefix("offset=")) else {
        return Ok(None);
    };
    if arguments.partition.is_some() || arguments.image_format.is_some() {
        bail!("-E offset={text}: neither with --partition nor with --image-format");
    }
    let offset = text::parse_size(text).map_err(|why| anyhow!("-E offset={text}: {why}"))?;
    Ok(Some(offset))
}

/// Usage types of mke2fs.conf(5).
#[derive(Debug, Clone, Copy, ValueEnum)]
enum UsageType {
    Floppy,
    Small,
    News,
    Default,
    Largefile,
    Largefile4,
    Big,
    Huge,
}

impl UsageType {
    /// Sets block size and bytes per inode of the usage, unless other options give them.
    fn apply(self, options: &mut FormatOptions) {
        let (block_bytes, bytes_per_inode) = match self {
            Self::Floppy => (Some(1024), 8192),
            Self::Small => (Some(1024), 4096),
            Self::News => (Some(4096), 4096),
            Self::Default => (Some(4096), 16 << 10),
            Self::Largefile => (None, 1 << 20),
            Self::Largefile4 => (None, 4 << 20),
            Self::Big => (Some(4096), 32 << 10),
            Self::Huge => (Some(4096), 64 << 10),
        };
        options.block_bytes = options.block_bytes.or(block_bytes);
        options.inodes = InodeCount::PerBytes(bytes_per_inode);
    }
}

fn parse_free_space(text: &str) -> Result<FreeSpace, String> {
    match text.strip_suffix('%') {
        None => text::parse_size(text).map(FreeSpace::Bytes),
        Some(part) => match parse_percent(part) {
            Some(part) if part <= 950_000 => Ok(FreeSpace::Ppm(part)),
            _ => Err("a size, or a percentage up to 95%".into()),
        },
    }
}

/// Converts the arguments to options, and to the owner of the root directory if one is given.
fn format_options(arguments: &Arguments) -> anyhow::Result<(FormatOptions, Option<(u32, u32)>)> {
    let kind = &arguments.kind;
    let defaults = FormatOptions::for_type(kind)
        .with_context(|| format!("-t {kind}: no such type; ext2, ext3 and ext4 are made"))?;
    let narrow = |flag: &str, size: u64| {
        u32::try_from(size).with_context(|| format!("{flag} {size}: too large"))
    };
    let mut options = FormatOptions {
        block_bytes: arguments.block.map(|size| narrow("-b", size)).transpose()?,
        cluster_bytes: arguments.cluster.map(|size| narrow("-C", size)).transpose()?,
        inode_bytes: narrow("-I", arguments.inode_size)?,
        reserved_ppm: parse_percent(&arguments.reserved)
            .with_context(|| format!("-m {}: not a percentage", arguments.reserved))?,
        label: arguments.label.clone().into_bytes(),
        time: u32::try_from(crate::edit::now_or_source_date()?.seconds).context("the clock")?,
        flex_groups: arguments.flex_groups,
        ..defaults
    };
    if let Some(usage) = arguments.usage {
        usage.apply(&mut options);
    }
    if let Some(count) = arguments.inodes {
        options.inodes = InodeCount::Count(count);
    } else if let Some(bytes) = arguments.bytes_per_inode {
        options.inodes = InodeCount::PerBytes(narrow("-i", bytes)?);
    }
    for list in &arguments.features {
        options.apply_features(list)?;
    }
    let user = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    // An empty volume belongs to the calling user. With --from, the root directory defaults to root
    // as in mke2fs, so that equal trees give equal volumes for every user.
    options.root_owner = if arguments.from.is_empty() { user } else { (0, 0) };
    let mut identities = UuidGenerator::new(arguments.seed);
    options.uuid = parse_uuid(&arguments.uuid, &mut identities)?;
    options.hash_seed = identities.uuid();
    for option in arguments.journal.iter().flat_map(|list| list.split(',')) {
        apply_journal_option(&mut options, option)?;
    }
    let mut root_owner = None;
    for option in arguments.extended.iter().flat_map(|list| list.split(',')) {
        match option.split_once('=').unwrap_or((option, "")) {
            ("root_owner", "") => root_owner = Some(user),
            ("root_owner", value) => {
                let owner = value
                    .split_once(':')
                    .and_then(|(uid, gid)| Some((uid.parse().ok()?, gid.parse().ok()?)));
                let owner = owner.with_context(|| format!("-E {option}: UID:GID is needed"))?;
                root_owner = Some(owner);
            }
            (name, value) => apply_extended_option(&mut options, name, value)?,
        }
    }
    if let Some(owner) = root_owner {
        options.root_owner = owner;
    }
    Ok((options, root_owner))
}

/// Applies one option of -J.
fn apply_journal_option(options: &mut FormatOptions, option: &str) -> anyhow::Result<()> {
    let (name, value) = option.split_once('=').unwrap_or((option, ""));
    let number =
        || value.parse::<u32>().with_context(|| format!("-J {name}={value}: a number is needed"));
    match name {
        "size" => options.journal.mib = Some(number()?),
        "fast_commit_size" => options.journal.fast_kib = Some(number()?),
        "location" => {
            let at = value.parse::<u64>();
            options.journal.at = Some(at.with_context(|| format!("-J {option}: a block"))?);
        }
        "device" => bail!("-J device: journals outside of their volume are not made"),
        "" => return Ok(()),
        _ => bail!("-J {name}: no such option; see draconis format --help"),
    }
    // As with mke2fs, any -J option requests a journal.
    options.compatible |= Compatible::HAS_JOURNAL;
    Ok(())
}

/// Applies one option of -E, except those about the root directory.
fn apply_extended_option(
    options: &mut FormatOptions,
    name: &str,
    value: &str,
) -> anyhow::Result<()> {
    let number = |most: u64| {
        let number = value.parse::<u64>().ok().filter(|number| *number <= most);
        number.with_context(|| format!("-E {name}={value}: a number up to {most} is needed"))
    };
    match name {
        "hash_seed" => {
            let seed = uuid::parse(value);
            options.hash_seed = seed.with_context(|| format!("-E {name}={value}: not a UUID"))?;
        }
        "hash_alg" => {
            let known = ["legacy", "half_md4", "tea"];
            let nth = known.iter().position(|known| *known == value);
            let nth = nth.with_context(|| format!("-E {name}={value}: {}", known.join(", ")))?;
            options.hash_version = nth as u8;
        }
        "stride" => options.stride = number(u16::MAX.into())? as u16,
        "stripe_width" | "stripe-width" => {
            options.stripe_width = number(u32::MAX.into())? as u32;
        }
        "resize" => {
            options.resize_blocks = Some(number(1 << 48)?);
            options.compatible |= Compatible::RESIZE_INODE;
        }
        "num_backup_sb" => options.backups = number(2)? as u32,
        "packed_meta_blocks" => options.packed_meta_blocks = value.is_empty() || number(1)? == 1,
        "encoding" if ["utf8", "utf8-12.1"].contains(&value) => {
            options.incompatible |= Incompatible::CASEFOLD;
        }
        "encoding" => bail!("-E encoding={value}: only utf8 is known"),
        "quotatype" => options.quotas = parse_quota_types(value)?,
        "mmp_update_interval" => options.mmp_interval = number(u16::MAX.into())? as u16,
        "encoding_flags" if value == "strict" => options.strict_names = true,
        "encoding_flags" => bail!("-E encoding_flags={value}: only strict is known"),
        // Handled by `offset`.
        "offset" => {}
        "lazy_itable_init" | "lazy_journal_init" | "discard" | "nodiscard" | "" => {}
        _ => bail!("-E {name}: no such option; see draconis format --help"),
    }
    Ok(())
}

/// Parses kinds of quotas, as `usrquota:grpquota`.
fn parse_quota_types(text: &str) -> anyhow::Result<[bool; 3]> {
    let known = ["usrquota", "grpquota", "prjquota"];
    let mut quotas = [false; 3];
    for name in text.split(':') {
        let nth = known.iter().position(|known| *known == name);
        let counted = nth.and_then(|nth| quotas.get_mut(nth));
        *counted.with_context(|| format!("-E quotatype={text}: {}", known.join(", ")))? = true;
    }
    Ok(quotas)
}

/// Parses a percentage such as `12.5` into millionths.
fn parse_percent(text: &str) -> Option<u32> {
    let (whole, rest) = text.split_once('.').unwrap_or((text, ""));
    let digits: String = rest.chars().chain("0000".chars()).take(4).collect();
    whole.parse::<u32>().ok()?.checked_mul(10_000)?.checked_add(digits.parse().ok()?)
}

fn parse_uuid(text: &str, identities: &mut UuidGenerator) -> anyhow::Result<[u8; 16]> {
    match text {
        // A time-based UUID would disclose the time and the MAC address.
        "random" | "time" => Ok(identities.uuid()),
        "clear" => Ok([0; 16]),
        text => {
            uuid::parse(text).with_context(|| format!("-U {text}: a UUID, random, time or clear"))
        }
    }
}

/// Parses a size as mke2fs does: without a suffix in KiB, or in blocks if -b is given.
pub fn parse_mke2fs_size(text: &str, block: Option<u64>) -> Option<u64> {
    if text.bytes().all(|byte| byte.is_ascii_digit()) {
        return text.parse::<u64>().ok()?.checked_mul(block.unwrap_or(1024));
    }
    if let Some(sectors) = text.strip_suffix(['s', 'S']) {
        return sectors.parse::<u64>().ok()?.checked_mul(512);
    }
    draconis_service::options::parse_size(text)
}

fn plan_volume<'a>(
    arguments: &Arguments,
    options: &FormatOptions,
    opened: &FormatDestination,
    tree: &'a mut Tree,
) -> anyhow::Result<VolumePlan<'a>> {
    let shown = arguments.image.shown();
    let there = opened.len_bytes()?;
    let is_given = opened.has_fixed_size()?;
    let given = match &arguments.size {
        Some(text) => {
            let given = parse_mke2fs_size(text, arguments.block);
            Some(given.with_context(|| format!("{text}: not a size such as 4096, 64K or 1G"))?)
        }
        None if arguments.min => None,
        None if arguments.from.is_empty() && opened.container_format()?.is_some() => {
            bail!("{shown} is a disk image, which is not looked into: SIZE is needed")
        }
        None if is_given || (there > 0 && arguments.from.is_empty()) => Some(there),
        None if arguments.from.is_empty() => bail!("{shown} does not exist: SIZE is needed"),
        None => None,
    };
    if is_given && given.is_some_and(|given| given > there) {
        bail!("{shown} has only {}", text::format_bytes(there));
    }
    let plan = match given {
        Some(given) => mkfs::plan_for_size(options, tree, given)?,
        None if arguments.min => FreeSpace::Bytes(0).plan_volume(options, tree)?,
        None => arguments.free.unwrap_or_default().plan_volume(options, tree)?,
    };
    let len = plan.layout().len_bytes();
    if is_given && len > there {
        bail!(
            "{shown} has only {}, the tree needs {}",
            text::format_bytes(there),
            text::format_bytes(len)
        );
    }
    Ok(plan)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed_as_by_mke2fs() {
        assert_eq!(parse_mke2fs_size("100", None), Some(100 << 10));
        assert_eq!(parse_mke2fs_size("100", Some(4096)), Some(100 << 12));
        assert_eq!(parse_mke2fs_size("64m", Some(4096)), Some(64 << 20));
        assert_eq!(parse_mke2fs_size("8s", None), Some(4096));
        assert_eq!(parse_mke2fs_size("18446744073709551615", None), None);
        assert_eq!(parse_mke2fs_size("1.5G", None), None);
        assert_eq!(
            (parse_percent("5"), parse_percent("12.5"), parse_percent("0.01")),
            (Some(50_000), Some(125_000), Some(100))
        );
        assert_eq!(
            (parse_percent("-1"), parse_percent("x"), parse_percent("1.x")),
            (None, None, None)
        );
    }

    #[test]
    fn uuid_arguments_are_parsed() {
        let mut identities = UuidGenerator::new(Some(1));
        let text = "c1b9d5a2-f162-11cf-9ece-0020afc76f16";
        assert_eq!(parse_uuid(text, &mut identities).unwrap()[..4], [0xC1, 0xB9, 0xD5, 0xA2]);
        assert_eq!(parse_uuid("clear", &mut identities).unwrap(), [0; 16]);
        let (a, b) = (UuidGenerator::new(Some(1)).uuid(), UuidGenerator::new(Some(2)).uuid());
        assert_eq!(a, parse_uuid("random", &mut UuidGenerator::new(Some(1))).unwrap());
        assert_ne!(a, b);
        assert!(parse_uuid("c1b9d5a2f16211cf9ece0020afc76f16", &mut identities).is_err());
        assert!(uuid::parse("+1b9d5a2-f162-11cf-9ece-0020afc76f16").is_none());
    }
}
