//! `draconis format`: an ext2 volume in a file or on a device, empty or filled.
//!
//! Law 1: what is in use, and what holds something unless forced, is not touched.
//! Law 2: everything is known to fit before the first byte is written; a file that was
//! created for a volume that was not made is removed.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, bail};
use clap::Args;
use draconis_device::{FileDisk, FileOptions};
use draconis_exchange::contract::Time;
use draconis_ext::mkfs::{self, Contents, Inodes, Node, Options, Plan, Target, Tree, What};

use crate::populate::{self, Source, Stamp};
use crate::progress::{Progress, When};
use crate::uuid::{self, Identities};
use crate::{image, signature, text};

const FORMAT_OPTIONS: &str = "\
Options for -E, separated by commas:
  root_owner=UID:GID   owner of the root directory; without UID:GID, and where this is left
                       out, the user who runs this (with --from: the tree's own)
  hash_seed=UUID       what hashes of file names start from (random)
  hash_alg=NAME        how indexed directories hash names: legacy, half_md4, tea (half_md4)

Features for -O: ext_attr, resize_inode, dir_index, filetype, sparse_super, large_file (all
of them are the default), dir_nlink, extra_isize; ^FEATURE takes one away, none takes all.

--seed N with SOURCE_DATE_EPOCH in the environment makes the image reproducible bit for bit:
the same source gives the same bytes. Times later than SOURCE_DATE_EPOCH become that time.";

/// Make an ext2 volume, empty or filled from a directory or a tar archive.
///
/// The options are those of mke2fs, and so is the layout.
#[derive(Debug, Args)]
#[command(after_long_help = FORMAT_OPTIONS)]
pub struct Arguments {
    /// The kind of volume: ext2 is the only one yet.
    #[arg(short = 't', value_name = "TYPE", default_value = "ext2")]
    kind: String,
    /// Bytes of a block: 1024, 2048, 4096 .. 65536; by the size of the volume if left out.
    #[arg(short = 'b', value_name = "SIZE", value_parser = text::size)]
    block: Option<u64>,
    /// One inode for so many bytes.
    #[arg(short = 'i', value_name = "BYTES_PER_INODE", value_parser = text::size, conflicts_with = "inodes")]
    bytes_per_inode: Option<u64>,
    /// So many inodes.
    #[arg(short = 'N', value_name = "INODES")]
    inodes: Option<u32>,
    /// Bytes of an inode.
    #[arg(short = 'I', value_name = "INODE_SIZE", value_parser = text::size, default_value = "256")]
    inode_size: u64,
    /// Label, at most 16 bytes.
    #[arg(short = 'L', value_name = "LABEL", default_value = "")]
    label: String,
    /// Identity: a UUID, random, time or clear.
    #[arg(short = 'U', value_name = "UUID", default_value = "random")]
    uuid: String,
    /// Features to give or, with ^, to take away, separated by commas.
    #[arg(short = 'O', value_name = "FEATURE,^FEATURE", allow_hyphen_values = true)]
    features: Vec<String>,
    /// Blocks kept for the superuser, in percent.
    #[arg(short = 'm', value_name = "PERCENT", default_value = "5")]
    reserved: String,
    /// More options, separated by commas; see below.
    #[arg(short = 'E', value_name = "OPTIONS")]
    extended: Vec<String>,
    /// Fill the volume from a directory, or from a tar archive, plain or compressed with
    /// gzip, zstd or xz; - is an archive on standard input.
    #[arg(long, value_name = "DIR|TAR|-")]
    from: Option<PathBuf>,
    /// Room to leave free where SIZE is left out.
    #[arg(long, value_name = "SIZE", value_parser = text::size, requires = "from", conflicts_with = "size")]
    free: Option<u64>,
    /// Take identity and hash seed from this number instead of at random.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Overwrite what IMAGE holds.
    #[arg(long)]
    force: bool,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = When::Auto)]
    progress: When,
    /// The file or block device; a file that is not there is created.
    image: PathBuf,
    /// Size of the volume: in blocks with -b, else in KiB, or with K, M, G, T; if left out,
    /// that of IMAGE, or what the tree needs.
    size: Option<String>,
}

/// Files beyond this are written past the page cache.
const DIRECT_BYTES: u64 = 64 << 20;

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let image = &arguments.image;
    let shown = image.display();
    let (options, root_owner) = options(arguments)?;
    let opened = image::alone(image)?;
    if let Some(file) = &opened
        && !arguments.force
        && let Some(what) = signature::held(file)?
    {
        bail!("{shown} holds {what}; --force overwrites it");
    }
    let stamp = stamp(&options)?;
    let mut root = Node::new(What::Directory, 0o755).at(stamp.now);
    (root.uid, root.gid) = options.root_owner;
    let mut source = match &arguments.from {
        Some(from) => populate::scan(from, image, root, stamp)?,
        None => Source::new(Tree::new(root), Nothing),
    };
    if let Some((uid, gid)) = root_owner
        && let Some(root) = source.tree.node_mut(draconis_ext::mkfs::NodeId::ROOT)
    {
        (root.uid, root.gid) = (uid, gid);
    }
    let plan = plan(arguments, &options, opened.as_ref(), &mut source.tree)?;
    write(arguments, &plan, &*source.contents, opened)?;
    let superblock = plan.layout().superblock();
    log::info!(
        "{shown}: ext2, {}, {} blocks of {} bytes, {} inodes",
        text::bytes(plan.layout().len_bytes()),
        superblock.blocks,
        superblock.block_bytes,
        superblock.inodes
    );
    Ok(ExitCode::SUCCESS)
}

struct Nothing;

impl Contents for Nothing {
    fn read(&self, _: u64, _: u64, _: &mut [u8]) -> std::io::Result<()> {
        Err(ErrorKind::NotFound.into())
    }
}

/// What the command line asks for, and the owner of the root if it names one.
fn options(arguments: &Arguments) -> anyhow::Result<(Options, Option<(u32, u32)>)> {
    if arguments.kind != "ext2" {
        bail!("-t {}: only ext2 is made yet", arguments.kind);
    }
    let narrow = |flag: &str, size: u64| {
        u32::try_from(size).with_context(|| format!("{flag} {size}: too large"))
    };
    let mut options = Options {
        block_bytes: arguments.block.map(|size| narrow("-b", size)).transpose()?,
        inode_bytes: narrow("-I", arguments.inode_size)?,
        reserved_ppm: percent(&arguments.reserved)
            .with_context(|| format!("-m {}: not a percentage", arguments.reserved))?,
        label: arguments.label.clone().into_bytes(),
        time: u32::try_from(crate::change::now()?.seconds).context("the clock")?,
        ..Options::default()
    };
    if let Some(count) = arguments.inodes {
        options.inodes = Inodes::Count(count);
    } else if let Some(bytes) = arguments.bytes_per_inode {
        options.inodes = Inodes::PerBytes(narrow("-i", bytes)?);
    }
    for list in &arguments.features {
        options.features(list)?;
    }
    let user = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    // An empty volume is for the user who makes it. What a tree does not say is root's, as with
    // mke2fs: the same tree makes the same volume for every user.
    options.root_owner = if arguments.from.is_none() { user } else { (0, 0) };
    let mut identities = Identities::new(arguments.seed);
    options.uuid = identity(&arguments.uuid, &mut identities)?;
    options.hash_seed = identities.uuid();
    let mut root_owner = None;
    for option in arguments.extended.iter().flat_map(|list| list.split(',')) {
        let (name, value) = option.split_once('=').unwrap_or((option, ""));
        match name {
            "root_owner" if value.is_empty() => root_owner = Some(user),
            "root_owner" => {
                let owner = value
                    .split_once(':')
                    .and_then(|(uid, gid)| Some((uid.parse().ok()?, gid.parse().ok()?)));
                let owner = owner.with_context(|| format!("-E {option}: UID:GID is needed"))?;
                root_owner = Some(owner);
            }
            "hash_seed" => {
                let seed =
                    uuid::parse(value).with_context(|| format!("-E {option}: not a UUID"))?;
                options.hash_seed = seed;
            }
            "hash_alg" => {
                let known = ["legacy", "half_md4", "tea"];
                let nth = known.iter().position(|known| *known == value);
                let nth = nth.with_context(|| format!("-E {option}: legacy, half_md4 or tea"))?;
                options.hash_version = nth as u8;
            }
            "" => {}
            _ => bail!("-E {name}: no such option; see draconis format --help"),
        }
    }
    if let Some(owner) = root_owner {
        options.root_owner = owner;
    }
    Ok((options, root_owner))
}

/// `12.5` in millionths.
fn percent(text: &str) -> Option<u32> {
    let (whole, rest) = text.split_once('.').unwrap_or((text, ""));
    let digits: String = rest.chars().chain("0000".chars()).take(4).collect();
    whole.parse::<u32>().ok()?.checked_mul(10_000)?.checked_add(digits.parse().ok()?)
}

fn stamp(options: &Options) -> anyhow::Result<Stamp> {
    Ok(Stamp {
        now: Time { seconds: i64::from(options.time), nanoseconds: 0 },
        reproducible: std::env::var_os("SOURCE_DATE_EPOCH").is_some(),
    })
}

fn identity(text: &str, identities: &mut Identities) -> anyhow::Result<[u8; 16]> {
    match text {
        // One made from the time would tell it, and the machine's address besides.
        "random" | "time" => Ok(identities.uuid()),
        "clear" => Ok([0; 16]),
        text => {
            uuid::parse(text).with_context(|| format!("-U {text}: a UUID, random, time or clear"))
        }
    }
}

/// A size as mke2fs has it: without a letter in KiB, or in blocks where their size was given.
pub fn size(text: &str, block: Option<u64>) -> Option<u64> {
    if text.bytes().all(|byte| byte.is_ascii_digit()) {
        return text.parse::<u64>().ok()?.checked_mul(block.unwrap_or(1024));
    }
    if let Some(sectors) = text.strip_suffix(['s', 'S']) {
        return sectors.parse::<u64>().ok()?.checked_mul(512);
    }
    draconis_service::options::parse_size(text)
}

fn plan<'a>(
    arguments: &Arguments,
    options: &Options,
    opened: Option<&File>,
    tree: &'a mut Tree,
) -> anyhow::Result<Plan<'a>> {
    let shown = arguments.image.display();
    let there = opened.map(image::len_bytes).transpose()?.unwrap_or(0);
    let is_device = match opened {
        Some(file) => file.metadata()?.file_type().is_block_device(),
        None => false,
    };
    let given = match &arguments.size {
        Some(text) => {
            let given = size(text, arguments.block);
            Some(given.with_context(|| format!("{text}: not a size such as 4096, 64K or 1G"))?)
        }
        None if is_device || (there > 0 && arguments.from.is_none()) => Some(there),
        None if arguments.from.is_none() => bail!("{shown} does not exist: SIZE is needed"),
        None => None,
    };
    if is_device && given.is_some_and(|given| given > there) {
        bail!("{shown} has only {}", text::bytes(there));
    }
    Ok(match given {
        Some(given) => mkfs::sized(options, tree, given)?,
        None => mkfs::fitting(options, tree, arguments.free.unwrap_or(0))?,
    })
}

fn write(
    arguments: &Arguments,
    plan: &Plan<'_>,
    contents: &dyn Contents,
    opened: Option<File>,
) -> anyhow::Result<()> {
    let image = &arguments.image;
    let created = opened.is_none();
    let done = match opened {
        Some(file) => fill(arguments, plan, contents, file),
        None => create(image).and_then(|file| fill(arguments, plan, contents, file)),
    };
    if done.is_err() && created {
        let _ = std::fs::remove_file(image);
    }
    done
}

fn create(image: &Path) -> anyhow::Result<File> {
    let file = File::options().read(true).write(true).create_new(true).open(image);
    let file = match file {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let parent = image.parent().unwrap_or(Path::new("")).display();
            bail!("{parent}: no such directory; mkdir -p makes it")
        }
        file => file.with_context(|| image.display().to_string())?,
    };
    image::claim_alone(&file, image)?;
    Ok(file)
}

fn fill(
    arguments: &Arguments,
    plan: &Plan<'_>,
    contents: &dyn Contents,
    file: File,
) -> anyhow::Result<()> {
    let shown = arguments.image.display();
    let is_file = file.metadata()?.is_file();
    let len = plan.layout().len_bytes();
    if is_file {
        // Cut off and lengthened it is one hole, which reads as zeros.
        let keep = file.metadata()?.len().max(len);
        file.set_len(0)?;
        file.set_len(keep).with_context(|| format!("{shown}: {}", text::bytes(keep)))?;
    }
    let direct = !is_file || plan.data_bytes() > DIRECT_BYTES;
    let options = FileOptions { write: true, direct, uring: false };
    let disk = FileDisk::from_fd(file.into(), options).with_context(|| shown.to_string())?;
    let progress = Mutex::new(Progress::new(arguments.progress, plan.data_bytes()));
    let count = |bytes| progress.lock().unwrap_or_else(PoisonError::into_inner).add(bytes);
    let target = Target { disk: &disk, zeroed: is_file, progress: &count };
    mkfs::write(plan, contents, &target).with_context(|| format!("{shown}: no volume was made"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_mke2fs_reads_them() {
        assert_eq!(size("100", None), Some(100 << 10));
        assert_eq!(size("100", Some(4096)), Some(100 << 12));
        assert_eq!(size("64m", Some(4096)), Some(64 << 20));
        assert_eq!(size("8s", None), Some(4096));
        assert_eq!(size("18446744073709551615", None), None);
        assert_eq!(size("1.5G", None), None);
        assert_eq!(
            (percent("5"), percent("12.5"), percent("0.01")),
            (Some(50_000), Some(125_000), Some(100))
        );
        assert_eq!((percent("-1"), percent("x"), percent("1.x")), (None, None, None));
    }

    #[test]
    fn identities() {
        let mut identities = Identities::new(Some(1));
        let text = "c1b9d5a2-f162-11cf-9ece-0020afc76f16";
        assert_eq!(identity(text, &mut identities).unwrap()[..4], [0xC1, 0xB9, 0xD5, 0xA2]);
        assert_eq!(identity("clear", &mut identities).unwrap(), [0; 16]);
        let (a, b) = (Identities::new(Some(1)).uuid(), Identities::new(Some(2)).uuid());
        assert_eq!(a, identity("random", &mut Identities::new(Some(1))).unwrap());
        assert_ne!(a, b);
        assert!(identity("c1b9d5a2f16211cf9ece0020afc76f16", &mut identities).is_err());
        assert!(uuid::parse("+1b9d5a2-f162-11cf-9ece-0020afc76f16").is_none());
    }
}
