//! Sets of device buffers, each declared once with its size. Never grows a buffer after the start.
//! Surprising fact: the planner's number and the allocation come from the same line, so they cannot part.

/// Declares a struct of buffers over a type of sizes: `new` allocates it, `allocated_bytes` adds up what it really takes, and the sizes
/// get `bytes`, what it will take. Lengths are in values or ids; `parts` are sets of their own, `fields` are plain values.
macro_rules! buffers {
    (
        $(#[$meta:meta])* $name:ident, $sizes:ident: $Sizes:ty;
        bufs { $($(#[$doc:meta])* $buf:ident: $len:expr,)* }
        ids { $($(#[$id_doc:meta])* $ids:ident: $id_len:expr,)* }
        parts { $($(#[$part_doc:meta])* $part:ident: $Part:ident of $part_sizes:expr,)* }
        fields { $($(#[$field_doc:meta])* $field:ident: $Field:ty = $value:expr,)* }
    ) => {
        $(#[$meta])*
        pub struct $name<B: Backend> {
            $($(#[$doc])* pub $buf: B::Buf,)*
            $($(#[$id_doc])* pub $ids: B::Ids,)*
            $($(#[$part_doc])* pub $part: $Part<B>,)*
            $($(#[$field_doc])* pub $field: $Field,)*
        }

        impl<B: Backend> $name<B> {
            /// Allocates all buffers.
            pub fn new(sizes: $Sizes, backend: &B) -> Result<Self, BackendError> {
                let $sizes = &sizes;
                let made = Self {
                    $($buf: backend.alloc(stringify!($buf), $len)?,)*
                    $($ids: backend.alloc_ids(stringify!($ids), $id_len)?,)*
                    $($part: $Part::new($part_sizes, backend)?,)*
                    $($field: $value,)*
                };
                Ok(made)
            }

            /// Bytes that the buffers really take.
            pub fn allocated_bytes(&self, backend: &B) -> u64 {
                let values = 0 $(+ backend.len(&self.$buf))* $(+ backend.len_ids(&self.$ids))*;
                4 * values as u64 $(+ self.$part.allocated_bytes(backend))*
            }
        }

        impl $Sizes {
            /// Bytes of the buffers.
            pub fn bytes(&self) -> u64 {
                let $sizes = self;
                let values: usize = 0 $(+ $len)* $(+ $id_len)*;
                4 * values as u64 $(+ ($part_sizes).bytes())*
            }
        }
    };
}

pub(crate) use buffers;
