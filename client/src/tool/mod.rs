//! The layer that models see. At present it is the text of a result: [`render`].
pub mod render;
