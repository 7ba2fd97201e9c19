//! stub
pub mod render;
