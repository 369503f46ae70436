//! Images to export: opened and locked before confinement, read afterwards.
//!
//! Law: disks of one store share its store, which is open once.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, anyhow, bail, ensure};
use clap::ValueEnum;
use draconis_access::destination::refuse_output;
use draconis_container::{OpenedImage, SessionDisk, signature};
use draconis_device::{Disk, SubDisk, find_partition};
use draconis_types::path_bytes::ShowPath;

use super::clones::{CloneUse, Clones};
use crate::image::store_disk::{OpenStoreDisk, StoreDiskName, UnreadStoreDisk, parse_disk_name};
use crate::image::{self, BackingFiles, UnreadFile, UnreadImage, WriteArgs};
use crate::report;

/// Images that are open and locked, but not yet read.
pub struct UnreadSources {
    stores: Vec<UnreadStore>,
    images: Vec<(PathBuf, UnreadSource)>,
    place: WriteArgs,
    clones: Option<CloneNames>,
    clone_use: CloneUse,
}

/// Format of the images.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ImageFormat {
    /// Detect it.
    #[default]
    Auto,
    /// Export the bytes of the file as they are.
    Raw,
}

/// Names of the clones of `--clone`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CloneNames {
    /// Removed at disconnect.
    Temporary,
    /// Kept, as PREFIX-N.
    Kept(String),
}

impl std::str::FromStr for CloneNames {
    type Err = String;

    fn from_str(prefix: &str) -> Result<Self, String> {
        if prefix.is_empty() {
            return Ok(Self::Temporary);
        }
        parse_disk_name(&format!("{prefix}-1"))?;
        Ok(Self::Kept(prefix.to_owned()))
    }
}

struct UnreadStore {
    path: PathBuf,
    opened: UnreadStoreDisk,
}

enum UnreadSource {
    /// A disk in the store with this index.
    InStore(usize, StoreDiskName),
    Raw(UnreadImage),
    Writable(UnreadImage, BackingFiles),
    ReadOnly(UnreadFile, BackingFiles),
}

/// A disk to export.
pub struct Source {
    pub image: PathBuf,
    pub disk: Arc<dyn Disk>,
    /// The same disk, if its file has to be closed cleanly.
    pub session: Option<Arc<dyn SessionDisk>>,
    /// Clones of the disk, if they are exported instead.
    pub clones: Option<Arc<Clones>>,
    /// True if a write that reads see survives the death of this process: it is in the file.
    pub survives_death: bool,
}

impl UnreadSources {
    /// Opens and locks `images`: exclusively, or shared if `read_only` or if they can only be read.
    /// With `clones` the images must be disks or snapshots in stores.
    pub fn open(
        images: &[PathBuf],
        place: &WriteArgs,
        read_only: bool,
        format: ImageFormat,
        clones: Option<CloneNames>,
        clone_use: CloneUse,
    ) -> anyhow::Result<Self> {
        let is_located =
            place.offset.is_some() || place.partition.is_some() || !place.backing.is_empty();
        ensure!(
            images.len() == 1 || !is_located,
            "--offset, --partition and --backing are for one image; export the others by another \
             command"
        );
        if clones.is_some() {
            ensure!(
                !is_located,
                "--clone exports whole disks, without --offset, --partition, --backing"
            );
        }
        let mut sources =
            Self { stores: vec![], images: vec![], place: place.clone(), clones, clone_use };
        let names = images.iter().map(|image| image::parse_store_disk(image));
        let names = names.collect::<anyhow::Result<Vec<_>>>()?;
        for (path, name) in images.iter().zip(&names) {
            let source = match name {
                Some(name) => {
                    let writes = |it: &&StoreDiskName| {
                        it.store == name.store && !it.is_snapshot() && !read_only
                    };
                    let written = names.iter().flatten().find(writes).cloned();
                    // The store is written to also for clones of a snapshot.
                    let disk = || name.name.split('@').next().unwrap_or_default().to_owned();
                    let cloned = sources
                        .clones
                        .is_some()
                        .then(|| StoreDiskName { store: name.store.clone(), name: disk() });
                    let store = sources.open_store(name, cloned.or(written).as_ref())?;
                    UnreadSource::InStore(store, name.clone())
                }
                None if sources.clones.is_some() => bail!(
                    "{0}: --clone needs a disk in a store; draconis store put STORE NAME {0} puts a \
                     raw image into one",
                    path.shown()
                ),
                None if format == ImageFormat::Raw => UnreadSource::Raw(match read_only {
                    true => image::open_readable(path)?,
                    false => open_writable(path, place)?,
                }),
                None => open_image(path, place, read_only)?,
            };
            sources.images.push((path.clone(), source));
        }
        Ok(sources)
    }

    /// Opens the store of `name`, for writing if the disk `written` in it is to be written. Returns
    /// its index.
    fn open_store(
        &mut self,
        name: &StoreDiskName,
        written: Option<&StoreDiskName>,
    ) -> anyhow::Result<usize> {
        if let Some(index) = self.stores.iter().position(|store| store.path == name.store) {
            return Ok(index);
        }
        let opened = match written {
            Some(written) => image::open_store_disk_exclusive(written.clone(), self.place.force)?,
            None => image::open_store_disk_shared(name.clone())?,
        };
        self.stores.push(UnreadStore { path: name.store.clone(), opened });
        Ok(self.stores.len() - 1)
    }

    /// Reads what the images are, and returns their disks. The process is confined by now.
    pub fn start(self) -> anyhow::Result<Vec<Source>> {
        let stores = self.stores.into_iter().map(|store| store.opened.open());
        let stores = stores.collect::<anyhow::Result<Vec<OpenStoreDisk>>>()?;
        let (place, clone_names, clone_use) = (self.place, self.clones, self.clone_use);
        let images = self.images.into_iter().map(|(image, source)| {
            let mut clones = None;
            let is_in_store = matches!(source, UnreadSource::InStore(..));
            let rest_bytes = match &source {
                UnreadSource::Raw(UnreadImage::File(file))
                | UnreadSource::Writable(UnreadImage::File(file), _) => file.rest_bytes(),
                _ => 0,
            };
            let opened = match source {
                UnreadSource::InStore(store, mut name) => {
                    let store = stores.get(store).context("a store that was opened")?;
                    if let Some(names) = &clone_names {
                        let keep_as = match names {
                            CloneNames::Temporary => None,
                            CloneNames::Kept(prefix) => Some(&**prefix),
                        };
                        let made =
                            Clones::prepare(store.other_disk(&name), &name, keep_as, clone_use)?;
                        name = made.base().clone();
                        clones = Some(made);
                    }
                    let disk = store.other_disk(&name).disk()?;
                    OpenedImage { disk, format: None, session: None }
                }
                UnreadSource::Raw(file) => {
                    OpenedImage { disk: file.into_disk()?, format: None, session: None }
                }
                UnreadSource::Writable(file, behind) => {
                    let random = RandomState::new().build_hasher().finish();
                    let (file, behind) = (file.into_disk()?, behind.start_disks());
                    draconis_container::open_for_writing(file, &behind, random)
                        .with_context(|| image.shown().to_string())?
                }
                UnreadSource::ReadOnly(file, behind) => {
                    let (file, behind) = (file.start(&image)?, behind.start_disks());
                    draconis_container::open(file, &behind)
                        .with_context(|| image.shown().to_string())?
                }
            };
            let OpenedImage { disk, session, format } = opened;
            if rest_bytes > 0 && format.is_none() && place.partition.is_none() {
                report::print_notes(&[format!(
                    "{}: its last {rest_bytes} bytes are not exported: a disk has whole sectors of \
                     512 bytes; truncate(1) makes the file longer",
                    image.shown()
                )]);
            }
            let survives_death = !is_in_store && format.is_none() && session.is_none();
            let whole = disk.clone();
            let disk = select(disk, &place).with_context(|| image.shown().to_string())?;
            if place.force.is_none() && clones.is_none() && !disk.properties().read_only {
                signature::refuse_raid_member(&*whole, &*disk)
                    .map_err(|why| anyhow!("{}: {why}; -r only reads", image.shown()))?;
            }
            Ok(Source { image, disk, session, survives_death, clones })
        });
        images.collect()
    }
}

/// Opens an image that is not a disk in a store.
fn open_image(image: &Path, place: &WriteArgs, read_only: bool) -> anyhow::Result<UnreadSource> {
    refuse_output(image, &place.backing)?;
    let file = UnreadFile::open(image)?;
    let behind = BackingFiles::open(image, &place.backing)?;
    if read_only || file.is_compressed() {
        return Ok(UnreadSource::ReadOnly(file, behind));
    }
    // The lock of a writer excludes this reader's.
    drop(file);
    Ok(UnreadSource::Writable(open_writable(image, place)?, behind))
}

fn open_writable(image: &Path, place: &WriteArgs) -> anyhow::Result<UnreadImage> {
    Ok(match image::open_writable(image, place.force)? {
        // TRIM returns space to the file system.
        UnreadImage::File(file) => UnreadImage::File(file.with_discards()),
        other => other,
    })
}

/// Returns the part of a disk that the options name.
fn select(disk: Arc<dyn Disk>, place: &WriteArgs) -> anyhow::Result<Arc<dyn Disk>> {
    if let Some(number) = place.partition {
        let extent = find_partition(&*disk, number)?;
        return Ok(Arc::new(SubDisk::new(disk, extent)?));
    }
    match place.offset {
        Some(start) => Ok(Arc::new(SubDisk::from_offset(disk, start)?)),
        None => Ok(disk),
    }
}
