"""Every method, one file each; `catalog` lists them."""
