//! A volume by the path of its image, and what is in it by their paths.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use draconis_container::create::NewFormat;
use draconis_container::is_indexed;
use draconis_device::Disk;
use draconis_exchange::contract::{AttributeChange, Attributes, Kind, Time};
use draconis_ext::check::{self, Report};
use draconis_ext::mkfs::{self, FreeSpace, NodeId};
use draconis_ext::tune::Changes;
use draconis_ext::{
    AccessTimes, Follow, Info, InodeNumber, NewNode, Options, Renaming, Writing, XattrSet,
};
use draconis_service::options::MountOptions;
use draconis_service::volume::{part, part_for_writing};
use parking_lot::RwLock;
use rustix::io::Errno;

use crate::format::{self, Base};
use crate::held::{self, Held};
use crate::names::{names, split};
use crate::object::Name;
use crate::overwrite::Force;
use crate::packed::packed;
use crate::populate::{self, Choice, Filling, Found, Origin, Patterns, Platform, Reproducible};
use crate::resize::{self, Growing, Resized, Shrinking, Wanted};
use crate::say::{printable, tell};
use crate::tar::{How, Sparse, Watch};
use crate::uuid::Identities;
use crate::{Error, Result, image, tar, tuning};

/// Bytes that are changed in memory before they go to the image.
const DIRTY_BYTES: u64 = 64 << 20;
/// Complaints of an archive that are kept.
const COMPLAINTS: usize = 100;

/// Where in an image the volume is. Partitions are recognised by themselves, where only one holds
/// a volume.
#[derive(Clone, Debug, Default)]
pub struct Place {
    /// It begins at this byte.
    pub offset_bytes: Option<u64>,
    /// It is this partition, counted from 1.
    pub partition: Option<u32>,
    /// What an image differs from, the nearest first: names that an image says are not opened.
    pub backing: Vec<PathBuf>,
}

impl Place {
    /// The same as mount options.
    pub fn options(&self) -> MountOptions {
        MountOptions {
            offset_bytes: self.offset_bytes,
            partition: self.partition,
            ..MountOptions::default()
        }
    }
}

/// A volume that is to be made, empty or filled.
#[derive(Clone, Debug)]
pub struct NewVolume {
    /// `ext2`, `ext3` or `ext4`.
    pub kind: String,
    /// Its length; if left out, that of the image, or of a filled one in a file what it needs.
    pub len_bytes: Option<u64>,
    /// Free space of one whose length follows from its sources.
    pub free: FreeSpace,
    /// The smallest volume that holds the sources, also on a longer device: no free space.
    pub min: bool,
    /// Bytes of a block; by the length if left out.
    pub block_bytes: Option<u32>,
    /// Label, at most 16 bytes.
    pub label: Vec<u8>,
    /// Features to give or, with `^`, to take away, separated by commas, as `mke2fs -O` spells them.
    pub features: String,
    /// How many inodes; by the length if left out.
    pub inodes: Option<u32>,
    /// Millionths of the blocks that are kept for the superuser; 50,000 if left out.
    pub reserved_ppm: Option<u32>,
    /// Owner of the root directory; the user who runs this if left out, or what a source says.
    pub owner: Option<(u32, u32)>,
    /// Identity; random if left out.
    pub uuid: Option<[u8; 16]>,
    /// What it is filled with.
    pub from: Vec<Origin>,
    /// What of that is left out, by patterns as `tar --exclude` has them.
    pub exclude: Vec<Vec<u8>>,
    /// Of a container image for several platforms, this one; this machine's if left out.
    pub platform: Option<Platform>,
    /// What an archive may unpack to; 16 GiB and a hundred times its length if left out.
    pub limit_bytes: Option<u64>,
    /// Whose everything becomes.
    pub give_to: Option<(u32, u32)>,
    /// Everything becomes root's, and groups and others have no permissions.
    pub squash: bool,
    /// The same bytes of the same sources: times and identities follow from them.
    pub reproducible: bool,
    /// A disk image that the volume is made in; it lies in the file as it is if left out.
    pub image_format: Option<NewFormat>,
    /// What the image holds that may be lost.
    pub force: Force,
}

impl Default for NewVolume {
    fn default() -> Self {
        Self {
            kind: "ext4".into(),
            len_bytes: None,
            free: FreeSpace::Usual,
            min: false,
            block_bytes: None,
            label: vec![],
            features: String::new(),
            inodes: None,
            reserved_ppm: None,
            owner: None,
            uuid: None,
            from: vec![],
            exclude: vec![],
            platform: None,
            limit_bytes: None,
            give_to: None,
            squash: false,
            reproducible: false,
            image_format: None,
            force: Force::Nothing,
        }
    }
}

/// A volume that was made.
#[derive(Clone, Default, Debug)]
pub struct Made {
    /// What a user should know: what is left out, and what may not be meant.
    pub notes: Vec<String>,
    /// The configuration of the last container image, as JSON.
    pub config: Option<Vec<u8>>,
}

/// What a check found.
#[derive(Debug)]
pub struct Checked(pub Report);

impl Checked {
    /// Whether `e2fsck -fn` would have nothing to say.
    pub fn is_clean(&self) -> bool {
        self.0.is_clean()
    }
}

/// A name in a directory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Listed {
    /// The name.
    pub name: Vec<u8>,
    /// The inode.
    pub inode: u32,
    /// What it is.
    pub kind: Kind,
}

/// An open volume. Everything takes `&self`, from any number of threads.
///
/// What was written is in memory until [`Volume::sync`] or [`Volume::close`] returned, or until
/// there is much of it; a crash before then leaves the volume consistent, as it was a while ago.
pub struct Volume {
    image: PathBuf,
    maker: (u32, u32),
    /// With the claim of one that is changed.
    inner: RwLock<Option<(draconis_ext::Volume, Option<Held>)>>,
}

impl std::fmt::Debug for Volume {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Volume").field("image", &self.image).finish_non_exhaustive()
    }
}

impl Volume {
    /// Opens the volume in an image to be read, beside others who do.
    ///
    /// # Errors
    /// There is no volume, it is being changed, or it needs what is not known.
    pub fn open(image: &Path, place: &Place) -> Result<Arc<Self>> {
        let disk = readable(image, place)?;
        let volume = draconis_ext::Volume::open(disk.clone(), Options::default());
        let volume = volume.map_err(|error| image::refused(image, &*disk, error.into()))?;
        Ok(Self::new(image, volume, None))
    }

    /// Opens the volume in an image to be changed, alone.
    ///
    /// # Errors
    /// As [`Volume::open`]; it is in use, or can only be read.
    pub fn open_for_writing(image: &Path, place: &Place) -> Result<Arc<Self>> {
        let disk = image::writable(image)?.start()?;
        let behind = image::Behind::open(image, &place.backing)?.start();
        let (volume, held) = changeable(image, disk, &behind, &place.options(), Arc::new(clock))?;
        if let Some(why) = volume.read_only_reason() {
            return Err(Error::new(Errno::ROFS, format!("{}: {why}", image.display())));
        }
        Ok(Self::new(image, volume, Some(held)))
    }

    fn new(image: &Path, volume: draconis_ext::Volume, held: Option<Held>) -> Arc<Self> {
        let maker = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let inner = RwLock::new(Some((volume, held)));
        Arc::new(Self { image: image.to_owned(), maker, inner })
    }

    /// Makes a volume in an image; a file that is not there is made.
    ///
    /// # Errors
    /// It is in use or holds something, there is no room, or a source cannot be read.
    pub fn create(image: &Path, new: &NewVolume) -> Result<Made> {
        Ok(create(image, new)?)
    }

    /// Makes the volume in an image larger: as long as is said, or all that there is. A file is
    /// lengthened.
    ///
    /// # Errors
    /// It is in use, cannot be so long, or what the disk gave.
    pub fn grow(image: &Path, place: &Place, len_bytes: Option<u64>) -> Result<Resized> {
        let (base, behind) = base(image, place)?;
        let wanted = Wanted { image, place, len_bytes, now: clock() };
        Ok(Growing::plan(wanted, &base, behind)?.write(&|_| {})?)
    }

    /// Makes the volume in an image smaller: as short as is said, or as what it holds. A file is
    /// cut behind it.
    ///
    /// # Errors
    /// It is in use, cannot be so short, or what the disk gave.
    pub fn shrink(image: &Path, place: &Place, len_bytes: Option<u64>) -> Result<Resized> {
        let (base, behind) = base(image, place)?;
        let wanted = Wanted { image, place, len_bytes, now: clock() };
        Ok(Shrinking::plan(wanted, base, behind, || Ok(()))?.write(&|_| {})?)
    }

    /// Changes what the volume in an image says of itself.
    ///
    /// # Errors
    /// It is in use, cannot be changed so, or what the disk gave.
    pub fn tune(image: &Path, place: &Place, changes: &Changes) -> Result<()> {
        let disk = image::writable(image)?.start()?;
        let behind = image::Behind::open(image, &place.backing)?.start();
        let part = part_for_writing(disk, &behind, &place.options());
        let disk = part.with_context(|| image.display().to_string())?.disk;
        Ok(tuning::tune(image, &disk, changes, clock())?)
    }

    /// Checks the volume in an image, without changing it.
    ///
    /// # Errors
    /// It cannot be checked. Damage is no error.
    pub fn check(image: &Path, place: &Place) -> Result<Checked> {
        let disk = readable(image, place)?;
        let report = check::check(&disk, check::Options::default(), &|_, _| {});
        let report = report.map_err(|error| image::refused(image, &*disk, error.into()))?;
        Ok(Checked(report))
    }

    /// The path of the image.
    pub fn image(&self) -> &Path {
        &self.image
    }

    /// Makes all durable, marks the volume as unmounted, and gives the image back. Waits for calls
    /// under way; later ones are refused.
    ///
    /// # Errors
    /// What made the disk fail, now or before: what was changed last is not there.
    pub fn close(&self) -> Result<()> {
        let Some((volume, _held)) = self.inner.write().take() else { return Ok(()) };
        let closed = volume.close();
        let failure = volume.failure();
        let Some(why) = failure.or_else(|| closed.err().map(|error| error.to_string())) else {
            return Ok(());
        };
        let shown = self.image.display();
        let text = format!(
            "{shown}: {why}; what was changed last is not there, and draconis check {shown} looks \
             at the rest"
        );
        Err(Error::new(Errno::IO, text))
    }

    /// Makes durable what was changed.
    ///
    /// # Errors
    /// What made the disk fail.
    pub fn sync(&self) -> Result<()> {
        self.with(b"/", |volume| match volume.is_writable() {
            true => volume.sync(),
            false => Ok(()),
        })
    }

    /// Whether it can be changed.
    ///
    /// # Errors
    /// It is closed.
    pub fn is_writable(&self) -> Result<bool> {
        self.with(b"/", |volume| Ok(volume.is_writable()))
    }

    /// What there is to know of it.
    ///
    /// # Errors
    /// It is closed.
    pub fn info(&self) -> Result<Info> {
        self.with(b"/", |volume| Ok(volume.info()))
    }

    /// What `stat` shows.
    ///
    /// # Errors
    /// It is not there, or damaged.
    pub fn stat(&self, path: &[u8], follow: Follow) -> Result<Attributes> {
        self.with(path, |volume| volume.attributes(find(volume, path, follow)?))
    }

    /// The names in a directory, sorted, without `.` and `..`. With damage, what could be read
    /// and the failure.
    ///
    /// # Errors
    /// It is no directory, or cannot be read.
    pub fn list(&self, path: &[u8]) -> Result<(Vec<Listed>, Option<Error>)> {
        let label = self.label(path);
        self.do_with(|volume| {
            let dir = find(volume, path, Follow::Yes).map_err(|error| tell(&label, error))?;
            let mut damage = None;
            let mut complain = |error: &anyhow::Error| {
                damage.get_or_insert_with(|| Error::new(Errno::UCLEAN, crate::say::said(error)));
            };
            let listing = names(volume, dir, &label, &mut complain)?;
            let mut all = Vec::with_capacity(listing.names.len());
            for entry in listing.names {
                let kind = match entry.kind {
                    Some(kind) => Ok(kind),
                    None => volume.inode(entry.inode).map(|inode| inode.kind),
                };
                match kind {
                    Ok(kind) => {
                        all.push(Listed { name: entry.name, inode: entry.inode.0, kind });
                    }
                    Err(error) => complain(&tell(&label, error)),
                }
            }
            Ok((all, damage))
        })
    }

    /// Where a symbolic link leads.
    ///
    /// # Errors
    /// It is none.
    pub fn read_link(&self, path: &[u8]) -> Result<Vec<u8>> {
        self.with(path, |volume| volume.read_link(find(volume, path, Follow::No)?))
    }

    /// The names of extended attributes.
    ///
    /// # Errors
    /// It is not there, or damaged.
    pub fn xattr_names(&self, path: &[u8], follow: Follow) -> Result<Vec<Vec<u8>>> {
        self.with(path, |volume| volume.xattr_names(find(volume, path, follow)?))
    }

    /// An extended attribute, by its whole name (`user.x`).
    ///
    /// # Errors
    /// `ENODATA` if there is none of that name.
    pub fn xattr(&self, path: &[u8], name: &[u8], follow: Follow) -> Result<Vec<u8>> {
        self.with(path, |volume| volume.xattr(find(volume, path, follow)?, name))
    }

    /// Sets an extended attribute.
    ///
    /// # Errors
    /// `EEXIST` and `ENODATA` as `how` says; there is no room, or no place for such a name.
    pub fn set_xattr(
        &self,
        path: &[u8],
        name: &[u8],
        value: &[u8],
        how: XattrSet,
        follow: Follow,
    ) -> Result<()> {
        self.with(path, |volume| {
            volume.set_xattr(find(volume, path, follow)?, name, value, how, false)
        })
    }

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// `ENODATA` if there is none of that name.
    pub fn remove_xattr(&self, path: &[u8], name: &[u8], follow: Follow) -> Result<()> {
        self.with(path, |volume| volume.remove_xattr(find(volume, path, follow)?, name))
    }

    /// Makes a directory.
    ///
    /// # Errors
    /// The name is there, or there is no room.
    pub fn make_dir(&self, path: &[u8], mode: u32) -> Result<()> {
        self.make(path, Kind::Directory, mode, b"")
    }

    /// Makes a symbolic link that leads to `target`.
    ///
    /// # Errors
    /// As [`Volume::make_dir`].
    pub fn symlink(&self, target: &[u8], path: &[u8]) -> Result<()> {
        self.make(path, Kind::Symlink, 0o777, target)
    }

    /// Gives a file another name.
    ///
    /// # Errors
    /// As [`Volume::make_dir`]; directories have one name.
    pub fn link(&self, from: &[u8], to: &[u8]) -> Result<()> {
        self.with(to, |volume| {
            let inode = find(volume, from, Follow::No)?;
            let (dir, name) = entry(volume, to)?;
            volume.link(inode, dir, name)
        })
    }

    /// Removes a file, or whatever is no directory.
    ///
    /// # Errors
    /// It is not there, or a directory.
    pub fn unlink(&self, path: &[u8]) -> Result<()> {
        self.with(path, |volume| {
            let (dir, name) = entry(volume, path)?;
            volume.unlink(dir, name)
        })
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// It is not there, no directory, or not empty.
    pub fn remove_dir(&self, path: &[u8]) -> Result<()> {
        self.with(path, |volume| {
            let (dir, name) = entry(volume, path)?;
            volume.remove_directory(dir, name)
        })
    }

    /// Moves a name.
    ///
    /// # Errors
    /// It is not there; what is at `to` is not to be replaced, or cannot be.
    pub fn rename(&self, from: &[u8], to: &[u8], how: Renaming) -> Result<()> {
        self.with(from, |volume| {
            let (dir, name) = entry(volume, from)?;
            let (to_dir, to_name) = entry(volume, to)?;
            volume.rename(dir, name, to_dir, to_name, how)
        })
    }

    /// Changes mode, owner, times and length.
    ///
    /// # Errors
    /// It is not there, or cannot be changed.
    pub fn set_attributes(
        &self,
        path: &[u8],
        follow: Follow,
        change: &AttributeChange,
    ) -> Result<()> {
        self.with(path, |volume| {
            volume.set_attributes(find(volume, path, follow)?, change).map(drop)
        })
    }

    /// Writes a tree as an archive, as `draconis tar` does; what could not be read is left out,
    /// and comes back in words.
    ///
    /// # Errors
    /// The top is not there; what writing gave.
    pub fn tar(
        &self,
        path: &[u8],
        sparse: Sparse,
        out: &mut (dyn Write + '_),
    ) -> Result<Vec<String>> {
        let label = self.label(path);
        self.do_with(|volume| {
            let top = find(volume, path, Follow::Yes).map_err(|error| tell(&label, error))?;
            let prefix = split(path).1.to_vec();
            let how = How { prefix, sparse, is_layer: false };
            let mut left_out = LeftOut(vec![]);
            let written = tar::archive(volume, (top, &label), how, &mut left_out, out);
            written.with_context(|| label.clone())?;
            Ok(left_out.0)
        })
    }

    fn make(&self, path: &[u8], kind: Kind, mode: u32, target: &[u8]) -> Result<()> {
        self.with(path, |volume| {
            let new = self.node(kind, mode, target);
            volume.create_by_path(volume.root(), path, &new).map(drop)
        })
    }

    /// Something new, of the user who runs this.
    pub(crate) fn node<'a>(&self, kind: Kind, mode: u32, target: &'a [u8]) -> NewNode<'a> {
        let (uid, gid) = self.maker;
        NewNode { kind, mode: mode & 0o7777, uid, gid, device: (0, 0), target }
    }

    /// What a path is called in messages.
    pub(crate) fn label(&self, path: &[u8]) -> String {
        let slash = if path.starts_with(b"/") { "" } else { "/" };
        format!("{}:{slash}{}", self.image.display(), printable(path))
    }

    /// Works in the open volume; a failure is said to be about `path`.
    pub(crate) fn with<T>(
        &self,
        path: &[u8],
        work: impl FnOnce(&draconis_ext::Volume) -> draconis_ext::Result<T>,
    ) -> Result<T> {
        self.do_with(|volume| work(volume).map_err(|error| tell(&self.label(path), error)))
    }

    fn do_with<T>(
        &self,
        work: impl FnOnce(&draconis_ext::Volume) -> anyhow::Result<T>,
    ) -> Result<T> {
        // A call within a call, from a reader of an archive, must not wait for a `close` that
        // waits for it.
        let inner = self.inner.read_recursive();
        let Some((volume, _)) = &*inner else {
            let text = format!("{}: the volume was closed", self.image.display());
            return Err(Error::new(Errno::BADF, text));
        };
        Ok(work(volume)?)
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            log::warn!("{error}");
        }
    }
}

/// What an archive leaves out.
struct LeftOut(Vec<String>);

impl Watch for LeftOut {
    fn begin(&mut self, _: u64) {}

    fn did(&mut self, _: u64) {}

    fn tell(&mut self, error: &anyhow::Error) {
        if self.0.len() < COMPLAINTS {
            self.0.push(crate::say::said(error));
        }
    }
}

/// Opens the part of a disk that a volume is in, to be changed.
///
/// # Errors
/// There is no volume, or it needs what is not known.
pub fn changeable(
    image: &Path,
    disk: Arc<dyn Disk>,
    behind: &[Arc<dyn Disk>],
    options: &MountOptions,
    clock: Arc<dyn Fn() -> Time + Send + Sync>,
) -> anyhow::Result<(draconis_ext::Volume, Held)> {
    let part = part_for_writing(disk, behind, options);
    let disk = part.with_context(|| image.display().to_string())?.disk;
    let held = held::hold(image, &disk, clock())?;
    let writing = Writing {
        clock,
        dirty_bytes: DIRTY_BYTES,
        atime: AccessTimes::Never,
        // Of disks that is one in a store: files stay as dense as they came.
        discard: disk.properties().discards,
    };
    let opened =
        draconis_ext::Volume::open_claimed(disk.clone(), Options::default(), writing, held.lent());
    let volume = opened.map_err(|error| image::refused(image, &*disk, error.into()))?;
    Ok((volume, held))
}

/// What time it is.
pub fn clock() -> Time {
    match std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH) {
        Ok(now) => Time {
            seconds: i64::try_from(now.as_secs()).unwrap_or(i64::MAX),
            nanoseconds: now.subsec_nanos(),
        },
        Err(_) => Time::default(),
    }
}

fn readable(image: &Path, place: &Place) -> anyhow::Result<Arc<dyn Disk>> {
    let whole = match Name::of(image) {
        Some(name) => name.shared()?.start()?,
        None => readable_file(image)?,
    };
    let behind = image::Behind::open(image, &place.backing)?.start();
    let part = part(whole, &behind, &place.options());
    Ok(part.with_context(|| image.display().to_string())?.disk)
}

/// A file or device that is only read; one that is compressed is unpacked if it must be.
fn readable_file(image: &Path) -> anyhow::Result<Arc<dyn Disk>> {
    let start = |file| -> anyhow::Result<Arc<dyn Disk>> {
        Ok(Arc::new(image::opened(file, image, false)?.start()))
    };
    let file = image::shared(image)?;
    let packed = packed(&file, image)?;
    let whole = start(file)?;
    match packed {
        Some(packed)
            if !is_indexed(whole.clone()).with_context(|| image.display().to_string())? =>
        {
            start(packed.unpack(image, &mut |_| {})?)
        }
        _ => Ok(whole),
    }
}

pub(crate) fn find(
    volume: &draconis_ext::Volume,
    path: &[u8],
    follow: Follow,
) -> draconis_ext::Result<InodeNumber> {
    volume.resolve(volume.root(), path, follow)
}

/// The directory and the name that a path ends with.
pub(crate) fn entry<'p>(
    volume: &draconis_ext::Volume,
    path: &'p [u8],
) -> draconis_ext::Result<(InodeNumber, &'p [u8])> {
    volume.resolve_parent(volume.root(), path)
}

/// The format of a new disk image by its name, if there is one.
///
/// # Errors
/// It is none that is made.
pub fn image_format(name: Option<&str>) -> Result<Option<NewFormat>> {
    match name {
        None | Some("raw") => Ok(None),
        Some("qcow2") => Ok(Some(NewFormat::Qcow2)),
        Some("vhdx") => Ok(Some(NewFormat::Vhdx)),
        Some(other) => {
            let text = format!("{other}: raw, qcow2 and vhdx images are made");
            Err(Error::new(Errno::INVAL, text))
        }
    }
}

/// What a volume that is to have another length lies in, and what that differs from.
fn base(image: &Path, place: &Place) -> anyhow::Result<(resize::Base, image::Behind)> {
    let base = match Name::of(image) {
        Some(name) => resize::Base::InStore(name.alone()?.open()?),
        None => resize::Base::file(image)?,
    };
    Ok((base, image::Behind::open(image, &place.backing)?))
}

fn create(image: &Path, new: &NewVolume) -> anyhow::Result<Made> {
    let shown = image.display();
    let defaults = mkfs::Options::of_type(&new.kind)
        .with_context(|| format!("{}: no such type; ext2, ext3 and ext4 are made", new.kind))?;
    let mut identities = Identities::new(None);
    // An empty volume is for the user who makes it. What a source does not say is root's.
    let user = match new.from.is_empty() {
        true => (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw()),
        false => (0, 0),
    };
    let mut options = mkfs::Options {
        block_bytes: new.block_bytes,
        label: new.label.clone(),
        time: u32::try_from(clock().seconds).context("the clock")?,
        root_owner: new.owner.unwrap_or(user),
        uuid: new.uuid.unwrap_or_else(|| identities.uuid()),
        hash_seed: identities.uuid(),
        inodes: new.inodes.map_or(defaults.inodes, mkfs::Inodes::Count),
        reserved_ppm: new.reserved_ppm.unwrap_or(defaults.reserved_ppm),
        ..defaults
    };
    options.features(&new.features)?;
    let base = Base::open(image, || Ok(()))?;
    base.may_become_volume(image, &new.force, "force")?;
    let base = match new.image_format {
        None => base.keeping_footer()?,
        Some(_) => base,
    };
    let filling = Filling {
        from: &new.from,
        list: None,
        exclude: &Patterns::new(new.exclude.iter().map(Vec::as_slice)),
        choice: Choice { platform: new.platform.clone(), beside: image, limit: new.limit_bytes },
        owner: new.give_to,
        squash: new.squash,
        squash_perms: new.squash,
        table: None,
        clamped: false,
        reproducible: new.reproducible.then(|| Reproducible {
            time: true,
            uuid: new.uuid.is_none(),
            hash_seed: true,
        }),
    };
    let Found { mut source, config } = populate::fill(filling, &mut options)?;
    if let (Some((uid, gid)), Some(root)) = (new.owner, source.tree.node_mut(NodeId::ROOT)) {
        (root.uid, root.gid) = (uid, gid);
    }
    let (there, is_given) = (base.len_bytes()?, base.has_given_length()?);
    let tree = &mut source.tree;
    let fills = is_given || (there > 0 && new.from.is_empty());
    let plan = match new.len_bytes.or((fills && !new.min).then_some(there)) {
        Some(len) => mkfs::sized(&options, tree, len)?,
        None if new.from.is_empty() => {
            return Err(crate::missing(format!("{shown} does not exist: a size is needed")));
        }
        None if new.min => FreeSpace::Bytes(0).fit(&options, tree)?,
        None => new.free.fit(&options, tree)?,
    };
    let needed = plan.layout().len_bytes();
    if is_given && needed > there {
        let (has, needed) = (crate::say::bytes(there), crate::say::bytes(needed));
        return Err(Error::new(Errno::NOSPC, format!("{shown} has only {has} of {needed}")).into());
    }
    format::write(image, base, &plan, &*source.contents, new.image_format, &|_| {})?;
    let mut notes = source.notes;
    notes.extend(source.faults.texts());
    Ok(Made { notes, config })
}
