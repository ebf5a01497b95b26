//! Parts of a forward pass that several architectures share.
