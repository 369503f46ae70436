//! Plots as PNG files, if the lab was built with that feature.

use std::path::Path;

/// Pixels per SVG unit.
#[cfg(feature = "png")]
const PNG_SCALE: f32 = 2.0;

/// Renders a plot.
///
/// # Errors
/// The SVG is invalid, or the file cannot be written.
#[cfg(feature = "png")]
pub fn write(path: &Path, svg: &str) -> anyhow::Result<()> {
    use std::sync::{Arc, OnceLock};

    use anyhow::Context;
    use resvg::{tiny_skia, usvg};

    static FONT_DATABASE: OnceLock<Arc<usvg::fontdb::Database>> = OnceLock::new();
    let fonts = FONT_DATABASE.get_or_init(|| {
        let mut fonts = usvg::fontdb::Database::new();
        fonts.load_system_fonts();
        let families = |face: &usvg::fontdb::FaceInfo| face.families.first().map(|f| f.0.clone());
        let names: Vec<String> = fonts.faces().filter_map(families).collect();
        let known = ["DejaVu Sans", "Liberation Sans", "Noto Sans"];
        let usual = known.iter().find(|name| names.iter().any(|has| has == **name));
        match usual.map(|name| (*name).to_string()).or_else(|| names.first().cloned()) {
            Some(name) => fonts.set_sans_serif_family(name),
            None => eprintln!("no fonts here: the PNG files have no texts (fonts-dejavu-core)"),
        }
        Arc::new(fonts)
    });
    let options = usvg::Options { fontdb: Arc::clone(fonts), ..usvg::Options::default() };
    let tree = usvg::Tree::from_str(svg, &options)?;
    let size = tree.size();
    let (width, height) = ((size.width() * PNG_SCALE) as u32, (size.height() * PNG_SCALE) as u32);
    let mut pixels = tiny_skia::Pixmap::new(width.max(1), height.max(1)).context("a size")?;
    let zoom = tiny_skia::Transform::from_scale(PNG_SCALE, PNG_SCALE);
    resvg::render(&tree, zoom, &mut pixels.as_mut());
    Ok(pixels.save_png(path)?)
}

/// Does nothing: the lab was built without the feature.
#[cfg(not(feature = "png"))]
pub fn write(_: &Path, _: &str) -> anyhow::Result<()> {
    Ok(())
}
