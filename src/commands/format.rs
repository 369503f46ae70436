//! `draconis format`: an ext2 volume in a file or on a device, empty or filled.
//!
//! Law 1: what is in use, and what holds something unless forced, is not touched.
//! Law 2: everything is known to fit before the first byte is written; a file that was
//! created for a volume that was not made is removed.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, bail};
use draconis_device::{FileDisk, FileOptions};
use draconis_exchange::contract::Time;
use draconis_ext::mkfs::{self, Contents, Inodes, Node, Options, Plan, Target, Tree, What};

use crate::cli::Format;
use crate::image;
use crate::populate::{self, Source, Stamp};
use crate::progress::Progress;
use crate::signature;
use crate::text;

/// Files beyond this are written past the page cache.
const DIRECT_BYTES: u64 = 64 << 20;

pub fn run(arguments: &Format) -> anyhow::Result<ExitCode> {
    let image = &arguments.image;
    let shown = image.display();
    let (options, root_owner) = options(arguments)?;
    let opened = image::alone(image)?;
    if let Some(file) = &opened
        && !arguments.force
        && let Some(what) = holds(file)?
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
fn options(arguments: &Format) -> anyhow::Result<(Options, Option<(u32, u32)>)> {
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
    // An empty volume is for whoever makes it. What a tree does not say is root's, as with
    // mke2fs: the same tree makes the same volume, whoever runs this.
    options.root_owner = if arguments.from.is_none() { user } else { (0, 0) };
    let mut random = Random::new(arguments.seed);
    options.uuid = identity(&arguments.uuid, &mut random)?;
    options.hash_seed = random.uuid();
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
                let seed = uuid(value).with_context(|| format!("-E {option}: not a UUID"))?;
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

/// Chance: from a seed, so that it can be had again, or from the system.
pub struct Random(Option<u64>);

impl Random {
    pub fn new(seed: Option<u64>) -> Self {
        Self(seed)
    }

    /// The next number (splitmix64).
    fn next(state: &mut u64) -> u64 {
        *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = *state;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ mixed >> 31
    }

    /// A UUID of version 4.
    pub fn uuid(&mut self) -> [u8; 16] {
        let mut bytes = [0; 16];
        match &mut self.0 {
            Some(state) => {
                let halves = [Self::next(state), Self::next(state)].map(u64::to_le_bytes);
                bytes.copy_from_slice(halves.as_flattened());
            }
            None => {
                if let Ok(mut file) = File::open("/dev/urandom") {
                    let _ = std::io::Read::read_exact(&mut file, &mut bytes);
                }
            }
        }
        bytes[6] = bytes[6] & 0x0F | 0x40;
        bytes[8] = bytes[8] & 0x3F | 0x80;
        bytes
    }
}

fn identity(text: &str, random: &mut Random) -> anyhow::Result<[u8; 16]> {
    match text {
        // One made from the time would tell it, and the machine's address besides.
        "random" | "time" => Ok(random.uuid()),
        "clear" => Ok([0; 16]),
        text => uuid(text).with_context(|| format!("-U {text}: a UUID, random, time or clear")),
    }
}

fn uuid(text: &str) -> Option<[u8; 16]> {
    let hyphens = text.bytes().enumerate().filter(|(_, byte)| *byte == b'-').map(|(at, _)| at);
    if text.len() != 36 || !hyphens.eq([8, 13, 18, 23]) {
        return None;
    }
    let digits: String = text.chars().filter(|c| *c != '-').collect();
    if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    let value = u128::from_str_radix(&digits, 16).ok()?;
    Some(value.to_be_bytes())
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
    arguments: &Format,
    options: &Options,
    opened: Option<&File>,
    tree: &'a mut Tree,
) -> anyhow::Result<Plan<'a>> {
    let shown = arguments.image.display();
    let there = opened.map(len_bytes).transpose()?.unwrap_or(0);
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

pub fn len_bytes(file: &File) -> anyhow::Result<u64> {
    Ok(rustix::fs::seek(file, rustix::fs::SeekFrom::End(0))?)
}

/// What a file or device holds, as far as that is easily known.
pub fn holds(file: &File) -> anyhow::Result<Option<&'static str>> {
    let mut head = vec![0; signature::HEAD_BYTES];
    let mut len = 0;
    while len < head.len() {
        match file.read_at(&mut head[len..], len as u64)? {
            0 => break,
            got => len += got,
        }
    }
    Ok(signature::of(&head[..len]))
}

fn write(
    arguments: &Format,
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
    arguments: &Format,
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
        let mut random = Random::new(Some(1));
        let text = "c1b9d5a2-f162-11cf-9ece-0020afc76f16";
        assert_eq!(identity(text, &mut random).unwrap()[..4], [0xC1, 0xB9, 0xD5, 0xA2]);
        assert_eq!(identity("clear", &mut random).unwrap(), [0; 16]);
        let (a, b) = (Random::new(Some(1)).uuid(), Random::new(Some(2)).uuid());
        assert_eq!(a, identity("random", &mut Random::new(Some(1))).unwrap());
        assert_ne!(a, b);
        assert!(identity("c1b9d5a2f16211cf9ece0020afc76f16", &mut random).is_err());
        assert!(uuid("+1b9d5a2-f162-11cf-9ece-0020afc76f16").is_none());
    }
}
