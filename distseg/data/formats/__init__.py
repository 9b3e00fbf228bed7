"""Image formats: a reader for each kind of file, and what the readers share.

::

    readers.py           open_image chooses the reader by a file's ending; npy, PNG, JPEG and others
    base.py              Reader, the base class
    tiff.py, tiff_*.py   TIFF; lerc.py and packed.py check compressed pixels, slides.py knows slides
    gdal.py, pam.py      rasters of GDAL's other formats, and GDAL's files beside images
    nifti.py, nrrd.py    volumes, with voxels.py
    ome_zarr*.py         OME-Zarr, with ngff.py (metadata) and zarr_*.py (chunks)
    alpha.py, marks.py   what files declare: transparency, orientation, colours, compression
    palettes.py          colours of classes; georeference.py: where an image lies on earth
    plausible.py         checks sizes in headers; mapped.py: arrays in scratch files
"""
