//! Conformance of the layout for buckets.

#[test]
fn bucket_layout_conforms() {
    draconis_objects::conform::check_all(draconis_objects::LayoutKind::Bucket);
}
